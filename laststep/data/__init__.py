"""Samples and their order: data sets, loading, and the seeds of every random draw.

Not here: models and losses (tasks)."""
