"""checkpoint.anchors: which checkpoints stay for good."""

from __future__ import annotations

import pytest

from laststep.config.errors import ConfigError
from laststep.config.keep import Anchors


def test_every_n_steps() -> None:
    """What is not at such a step goes, as it would without anchors."""
    assert Anchors.parse(100).kept({50: 1, 100: 1, 150: 1, 200: 1}, 210) == {100, 200}


def test_as_many_as_fit() -> None:
    """The disk never holds more than was given, and what stays is the sparser the older."""
    anchors, held = Anchors.parse("10 MB"), dict[int, int]()
    for step in range(10, 5000, 10):
        held = {old: held.get(old, 2_000_000) for old in anchors.kept({**held, step: 2_000_000}, step + 10)}
        assert sum(held.values()) <= 10_000_000
    steps = sorted(held)
    gaps = [later - earlier for earlier, later in zip([0, *steps], steps)]
    assert len(steps) == 5 and gaps[0] > gaps[-1] and steps[-1] >= 4900


@pytest.mark.parametrize("value", ["many", "0GB", "-3GB", "5 XB", ""])
def test_refused(value: str) -> None:
    """One line says what to write."""
    with pytest.raises(ConfigError, match="must be a number of steps, or a size in MB, GB or TB, such as 200GB"):
        Anchors.parse(value)
