-- Acceptance lengths by real decoding, newest evaluation of each name and step.
SELECT folder, name, global_step, prompts, round(acceptance_length, 3) AS acceptance_length,
       round(acceptance_length_low, 3) AS low, round(acceptance_length_high, 3) AS high,
       round(tokens_per_second, 1) AS tokens_per_second,
       round(tokens_per_second / plain_tokens_per_second, 2) AS speedup, mismatches, ties
FROM evaluations QUALIFY row_number() OVER (PARTITION BY folder, name, global_step ORDER BY time DESC) = 1
ORDER BY folder, name, global_step
