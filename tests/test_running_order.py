"""The lists of slow and quick tests name tests that exist: a renamed module would silently join the quick tests."""

from __future__ import annotations

import pytest

from tests.support.project import PROJECT
from tests.support.running_order import LONG, QUICK, SLOW, alternate, is_long, is_slow, missing


@pytest.mark.parametrize("place", [*SLOW, *QUICK])
def test_listed_tests_exist(place: str) -> None:
    file, _, name = place.partition("::")
    path = PROJECT / "tests" / (file if file.endswith(("/", ".py")) else f"{file}.py")
    assert path.exists()
    assert not name or f"def {name.partition('[')[0]}" in path.read_text()


def test_quick_tests_are_exceptions() -> None:
    assert not any(is_slow(f"tests/{place}") for place in QUICK)
    assert is_slow("tests/slurm/test_operate.py::test_a_sweep") and not is_slow("tests/config/test_config.py::test_any")


def test_long_tests() -> None:
    """They are slow, so `make test-fast` leaves them out, too. A case that is gone is named where its module is
    collected."""
    assert all(is_slow(f"tests/{test}") for test in LONG)
    assert is_long("tests/loops/test_exact.py::test_stop_anywhere[first-step]")
    assert not is_long("tests/loops/test_exact.py::test_stop_anywhere[mid-epoch]")
    assert not is_long("tests/loops/test_exact.py::test_compiled")
    assert missing(["tests/loops/test_sizes.py::test_another"]) == [
        "loops/test_sizes.py::test_one_four_three_two_ranks[2]"
    ]
    assert missing(["tests/loops/test_sizes.py::test_one_four_three_two_ranks[2]"]) == []


def test_waiting_and_computing_alternate() -> None:
    """Evenly, however many there are of each, and each kind in its own order."""
    mixed = list(alternate([1, 2], [10, 20, 30, 40]))
    assert mixed == [1, 10, 20, 2, 30, 40]


def test_a_module_shares_its_fixtures(request: pytest.FixtureRequest) -> None:
    """pytest-xdist ignores groups in silence when it does not know this pytest. What a module shares was then made for
    each of its tests, and the suite took half as long again."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_running_order.py"), "pytest-xdist ignores xdist_group"
