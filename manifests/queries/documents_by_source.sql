-- Stored documents and tokens by source and split.
SELECT folder, source, split, count(*) AS documents, sum(n_tokens) AS tokens, sum(n_supervised) AS supervised,
       count(*) FILTER (truncated) AS truncated
FROM stored_documents GROUP BY folder, source, split ORDER BY folder, source, split
