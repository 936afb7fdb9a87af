-- Rows left out, by folder and reason, with one example.
SELECT folder, reason, count(*) AS rows, min(source || ':' || line) AS example
FROM skips GROUP BY folder, reason ORDER BY folder, rows DESC
