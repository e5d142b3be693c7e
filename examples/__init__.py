"""Loops to copy."""
