"""Differences planted into runs, to see whether `diff` finds each: `python -m tests.planted` reports on it."""
