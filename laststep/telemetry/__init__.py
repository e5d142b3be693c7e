"""Telemetry: what the machines of a run do, a line every ten seconds per node, read by status, report and alerts.

A program beside the training of each node takes the measures; the training itself measures nothing. Not here: what a
step has measured (laststep/loops/measured.py), and checks of a node before it trains (laststep/attempt/preflight.py).
"""
