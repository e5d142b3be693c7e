"""The scripts that write the generated pages and pictures of the documentation: `python -m tools.NAME`.

Not here: anything that a run imports (laststep/), and measuring (benchmarks/).
"""
