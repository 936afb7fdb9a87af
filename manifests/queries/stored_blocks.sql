-- Blocks that count: the newest record of each block, unless that withdraws it.
SELECT * FROM (SELECT * FROM shards QUALIFY row_number() OVER (PARTITION BY folder, block ORDER BY time DESC) = 1)
WHERE state = 'done'
