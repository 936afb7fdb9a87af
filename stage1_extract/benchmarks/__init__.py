"""Measurements of stage 1, run by hand: `python -m stage1_extract.benchmarks.NAME`."""
