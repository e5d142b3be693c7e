"""Benchmarks behind the figures in docs/benchmarks.md, one file each. `python -m benchmarks` runs them all."""
