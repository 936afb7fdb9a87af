-- Stores: blocks and tokens done, bytes per token, and when the last block was recorded.
SELECT folder, count(DISTINCT block) AS blocks, sum(documents) AS documents, sum(tokens) AS tokens,
       round(sum(bytes) / 1e9, 3) AS gigabytes, round(sum(bytes) / sum(tokens), 0) AS bytes_per_token,
       round(sum(tokens) / nullif(sum(seconds), 0), 0) AS tokens_per_second_per_worker,
       to_timestamp(max(time)) AS last_block
FROM (SELECT * FROM shards QUALIFY row_number() OVER (PARTITION BY folder, block ORDER BY time DESC) = 1)
GROUP BY folder ORDER BY folder
