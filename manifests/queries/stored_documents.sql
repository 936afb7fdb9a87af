-- Documents that count: of blocks that count, each once, whatever earlier attempts left behind.
SELECT documents.*
FROM documents JOIN stored_blocks USING (folder, block)
WHERE documents.seal IN (stored_blocks.seal, '')
QUALIFY row_number() OVER (PARTITION BY folder, block, document_index ORDER BY documents.time DESC) = 1
