"""Processes, files, the teacher store and the target: what both stages stand on."""
