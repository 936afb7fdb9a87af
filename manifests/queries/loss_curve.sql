-- Training loss by step; after a resume the last value of a step wins.
SELECT folder, global_step, value AS loss
FROM metrics WHERE split = 'train' AND name = 'loss'
QUALIFY row_number() OVER (PARTITION BY folder, global_step ORDER BY time DESC) = 1 ORDER BY folder, global_step
