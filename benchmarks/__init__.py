"""Measurements with a baseline and a reference check: `python -m benchmarks.NAME`."""
