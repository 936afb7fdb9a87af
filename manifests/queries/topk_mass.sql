-- How much of the teacher's probability the stored top k hold, by source: what is missing a drafter cannot learn.
SELECT folder, source, count(*) AS documents, round(sum(topk_mass * n_tokens) / sum(n_tokens), 4) AS topk_mass,
       round(quantile_cont(topk_mass, 0.01), 4) AS lowest_percent, round(min(topk_mass), 4) AS lowest
FROM stored_documents WHERE topk_mass IS NOT NULL GROUP BY folder, source ORDER BY folder, source
