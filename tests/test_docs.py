"""The documentation says what the code does."""

from __future__ import annotations

from docs import reference, scale


def test_configuration_reference_is_current() -> None:
    """A key that the page lacks, or describes as it was, sends users wrong. The cure: python -m docs.reference"""
    assert reference.TARGET.read_text() == reference.reference()


def test_scale_page_is_current() -> None:
    """It would go on quoting figures that nobody measures any more. The cure: python -m docs.scale"""
    assert scale.TARGET.read_text() == scale.page()
