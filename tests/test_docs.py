"""The documentation says what the code does."""

from __future__ import annotations

from docs.reference import TARGET, reference


def test_configuration_reference_is_current() -> None:
    """A key that the page lacks, or describes as it was, sends users wrong. The cure: python -m docs.reference"""
    assert TARGET.read_text() == reference()
