"""Data sets, the order of samples, and loading."""
