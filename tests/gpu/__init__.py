"""Tests on a GPU: `python -m tests.gpu` runs them in order of worth, and `make gpu-check` calls that.

Not here: tests of GPU code that need no GPU, which stand beside the other tests of their part. Tests that make sense on
a CPU as well run on one in `make test`. This module imports nothing, so that the command can say what is missing.
"""
