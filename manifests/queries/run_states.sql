-- The last known state of every command on every folder; refused commands changed nothing and are left out.
SELECT folder, command, state, exit_code, to_timestamp(time) AS since, message
FROM runs
WHERE run_id NOT IN (SELECT run_id FROM runs WHERE state = 'refused')
QUALIFY row_number() OVER (PARTITION BY folder, command ORDER BY time DESC) = 1 ORDER BY folder, command
