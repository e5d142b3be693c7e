"""Benchmarks behind the figures in the README, one file each. `python -m benchmarks` runs them all."""
