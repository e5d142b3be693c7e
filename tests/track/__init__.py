"""Tests of laststep.track."""
