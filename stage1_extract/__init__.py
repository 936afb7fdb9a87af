"""Stage 1: prompts to rows, and the target to a store of teacher features."""
