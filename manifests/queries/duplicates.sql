-- Documents stored more than once in a folder: the same doc_id, or the same tokens and loss mask.
SELECT folder, 'doc_id' AS same, doc_id AS value, count(*) AS times,
       list(document_index ORDER BY document_index) AS rows
FROM stored_documents GROUP BY folder, doc_id HAVING count(*) > 1
UNION ALL
SELECT folder, 'tokens', token_sha, count(*), list(document_index ORDER BY document_index)
FROM stored_documents WHERE token_sha <> '' GROUP BY folder, token_sha HAVING count(*) > 1
ORDER BY folder, same, times DESC, value
