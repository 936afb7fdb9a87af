"""Measurements of the store, run by hand: `python -m shared.benchmarks.store_io` and `.store_open`."""
