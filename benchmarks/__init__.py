"""The figures that the README quotes, one file each; `python -m benchmarks` runs them all."""
