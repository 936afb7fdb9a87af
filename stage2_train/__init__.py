"""Stage 2: from the teacher store to a trained, measured, exported drafter."""
