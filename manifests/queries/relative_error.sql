-- Error of quantised features by tap, relative to their norm: mean over blocks by tokens, and the worst block.
SELECT folder, tap.key AS tap, count(*) AS blocks,
       round(sum(CAST(tap.value AS DOUBLE) * tokens) / sum(tokens), 5) AS relative_error,
       round(max(CAST(tap.value AS DOUBLE)), 5) AS worst_block
FROM stored_blocks, json_each(stored_blocks.detail, '$.relative_error') AS tap
GROUP BY folder, tap.key ORDER BY folder, TRY_CAST(tap.key AS INTEGER), tap.key
