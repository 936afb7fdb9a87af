-- Stores: what is done, its size, and the rate from the first block's start to the last block's end (UTC).
SELECT folder, count(*) AS blocks, any_value(folders.planned_blocks) AS planned_blocks,
       sum(stored_blocks.documents) AS documents, sum(tokens) AS tokens, round(sum(bytes) / 1e9, 3) AS gigabytes,
       round(sum(bytes) / sum(tokens), 0) AS bytes_per_token,
       round(sum(tokens) / nullif(max(stored_blocks.time) - min(stored_blocks.time - seconds), 0), 0)
           AS tokens_per_second,
       round(sum(tokens) / nullif(sum(seconds), 0), 0) AS tokens_per_second_per_worker,
       make_timestamp(CAST(1e6 * max(stored_blocks.time) AS BIGINT)) AS last_block
FROM stored_blocks JOIN folders USING (folder) GROUP BY folder ORDER BY folder
