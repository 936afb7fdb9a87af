-- The last known state of every command on every folder.
SELECT folder, command, state, exit_code, to_timestamp(time) AS since, message
FROM runs QUALIFY row_number() OVER (PARTITION BY folder, command ORDER BY time DESC) = 1 ORDER BY folder, command
