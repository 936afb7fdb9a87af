"""Measurements of stage 2, run by hand: `python -m stage2_train.benchmarks.NAME`."""
