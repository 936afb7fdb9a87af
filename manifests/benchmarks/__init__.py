"""Measurements of the manifests, run by hand: `python -m manifests.benchmarks.open_store`."""
