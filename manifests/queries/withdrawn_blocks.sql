-- Blocks taken out again (found damaged, or removed), when (UTC), and whether they have been made anew since.
SELECT folder, block, make_timestamp(CAST(1e6 * shards.time AS BIGINT)) AS withdrawn, shards.writer,
       shards.detail ->> '$.reason' AS reason, stored_blocks.block IS NOT NULL AS made_again
FROM shards LEFT JOIN stored_blocks USING (folder, block)
WHERE shards.state = 'withdrawn' ORDER BY folder, block, withdrawn
