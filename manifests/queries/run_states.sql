-- The last known state of every command on every folder, since when (UTC); refused commands changed nothing.
SELECT folder, command, state, exit_code, make_timestamp(CAST(1e6 * time AS BIGINT)) AS since, message
FROM runs
WHERE run_id NOT IN (SELECT run_id FROM runs WHERE state = 'refused')
QUALIFY row_number() OVER (PARTITION BY folder, command ORDER BY time DESC) = 1 ORDER BY folder, command
