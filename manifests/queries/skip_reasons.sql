-- Rows left out, by folder and reason, each row once, with one example.
SELECT folder, reason, count(*) AS rows, min(source || ':' || line) AS example
FROM (SELECT DISTINCT folder, reason, source, line, doc_id FROM skips)
GROUP BY folder, reason ORDER BY folder, rows DESC, reason
