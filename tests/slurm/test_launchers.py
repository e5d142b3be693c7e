"""The same Trainer under every launcher. The table in launchers.md has the results: a row each, no cell empty.

After an intended change: LASTSTEP_UPDATE_GOLDEN=1 python -m pytest tests/slurm/test_launchers.py
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.desk import Desk
from tests.slurm.launchers import BY_DETECTION, LAUNCHERS, SMALL, Launcher, undisturbed
from tests.support.forked import forked_python
from tests.support.needs import require_package
from tests.support.project import PROJECT
from tests.support.ranks import fingerprint

PAGE = PROJECT / "tests/slurm/launchers.md"
NAMES = [*(launcher.name for launcher in LAUNCHERS), "Ray"]  # whose row is that of tests/frameworks/test_ray.py
COLUMNS = ("command", "ranks", "stop", "after the stop", "weights", "mismatch")
BEGINS = re.compile(r"attempt begins on \S+: rank (\d+) of (\d+) on (\S+) \([^;]*; ([^\s,]+)(?:, by (.*))?\)$", re.M)
every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)


class Table:
    """The table of launchers.md."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}
        lines = PAGE.read_text().splitlines()
        begin = next(number for number, line in enumerate(lines) if line.startswith("| launcher"))
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[begin:]):
            if not line.startswith(("| launcher", "| ---")):
                name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
                self.rows[name] = dict(zip(COLUMNS, cells))
        self.updates = bool(os.environ.get("LASTSTEP_UPDATE_GOLDEN"))

    def note(self, launcher: Launcher, column: str, text: str) -> None:
        """Check that a cell has this text, or update it."""
        row = self.rows.setdefault(launcher.name, {})
        if self.updates:
            row[column] = text
        assert row.get(column) == text, "tests/slurm/launchers.md"

    def write(self) -> None:
        rows = [("launcher", *COLUMNS), ("---",) * (len(COLUMNS) + 1)]
        for name in NAMES:
            row = self.rows.get(name, {})
            rows.append((name, *(row.get(column, "") for column in COLUMNS)))
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        PAGE.write_text(re.sub(r"(^\|.*\n)+", lambda _: table, PAGE.read_text(), count=1, flags=re.M))


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    if table.updates:
        table.write()


def run_name(launcher: Launcher, what: str) -> str:
    return re.sub(r"\W+", "-", f"{launcher.name}-{what}").strip("-")


@every_launcher
def test_it_starts_stops_and_goes_on(desk: Desk, plain_desk: Desk, table: Table, launcher: Launcher) -> None:
    """A rank that took itself for another would train on the wrong share of the data. And no step may be lost, however
    the launcher passes on a signal and whatever it does afterwards. The weights show both mistakes."""
    desk = plain_desk if launcher.plain else desk
    run = run_name(launcher, "run")
    epochs = len(launcher.stops) + 1
    words = (*SMALL, "task=tests.support.tasks.AwaitsStop", f"train.epochs={epochs}")
    desk.types(run, *launcher.typed, words=words)
    for count, stop in enumerate(launcher.stops, start=1):
        desk.waits_for(run, "holds in its step 8", times=launcher.size * count)
        desk.stops(run, stop)
        desk.waits_for_attempts(run, count)
        if not launcher.returns:
            desk.waits_for_terminals()
            desk.types(run, *launcher.typed, words=words)
    desk.waits_for_attempts(run, epochs)
    assert set(desk.waits_for_terminals()) == {0}, desk.log(run)
    assert f"its result is of step {7 * epochs}" in desk.log(run) or not launcher.results

    begun = BEGINS.findall(desk.log(run))
    ranks, sizes, hosts, names, variables = (sorted(set(column)) for column in zip(*begun))
    assert ranks == [str(rank) for rank in range(launcher.size)] and sizes == [str(launcher.size)]
    assert len(begun) == launcher.size * epochs
    table.note(launcher, "command", f"`{launcher.shown}`")
    assert set(hosts) == {host for attempt in desk.attempts(run) for host in attempt["hosts"]}
    (spread,) = {len(attempt["hosts"]) for attempt in desk.attempts(run)}
    by = ", ".join(dict.fromkeys(variables[0].split(" and "))) or names[0]
    where = "one host" if spread == 1 else f"{spread} hosts"
    table.note(launcher, "ranks", f"{' and '.join(ranks)} of {sizes[0]} on {where}, by {by}")

    *stopped, last = desk.attempts(run)
    ends = [(8 * count, 0) for count in range(1, epochs)]
    assert [(attempt["end_step"], attempt["lost_steps"]) for attempt in stopped] == ends
    assert last["reason"] == "finished"
    table.note(launcher, "stop", "; ".join(f"`{stop}`: no step lost" for stop in launcher.stops))
    after = "starts again by itself" if launcher.returns else "run the command again to continue"
    table.note(launcher, "after the stop", after)
    assert fingerprint(desk.run(run)) == undisturbed(launcher.size, epochs)
    table.note(launcher, "weights", "same as the undisturbed run")


@pytest.fixture(scope="module")
def accelerated(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk whose ranks are forked with Accelerate loaded."""
    require_package("accelerate")
    desk = Desk(cluster, tmp_path_factory.mktemp("desk"), forked_python("accelerate.accelerator"))
    yield desk
    desk.tidies_up()


@pytest.mark.parametrize("launcher", BY_DETECTION, ids=lambda launcher: launcher.name)
def test_a_script_on_accelerate(accelerated: Desk, plain_desk: Desk, launcher: Launcher) -> None:
    """It used to train in each rank for itself under all launchers but torchrun, and to "finish"."""
    desk = plain_desk if launcher.plain else accelerated
    run = run_name(launcher, "accelerate")
    desk.types(run, *launcher.typed, words=("task=tests.support.framework_loops.synchronised", "device=cpu"))
    desk.waits_for_attempts(run, 1)
    for number in range(2):
        desk.waits_for(run, f'synchronised {{"RANK": "{number}"')
    said = sorted(set(re.findall(r"synchronised (\{.*)$", desk.log(run), re.M)))  # a terminal may repeat the log
    first, second = map(json.loads, said)
    local = 3 - len(desk.attempts(run)[0]["hosts"])  # ranks per host
    for number, place in enumerate((first, second)):
        assert place.pop("RANK") == str(number) and place.pop("LOCAL_RANK") == str(number % local)
        assert place.pop("accelerator") == f"{number} of 2"
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"]) == ("2", str(local))
    assert first == second, "the same address and port, and the same weights"


@every_launcher
def test_contradiction(desk: Desk, table: Table, launcher: Launcher) -> None:
    """If the variables of two launchers disagree, ranks would each train alone, or wait for ranks that do not exist.
    Where no such mistake is possible, the page says why."""
    if not launcher.mistake:
        return table.note(launcher, "mismatch", f"none: {launcher.refusal}")
    run = run_name(launcher, "wrong")
    desk.types(run, launcher.mistake, words=SMALL if launcher.mistake[0] != "sbatch" else ())
    desk.waits_for(run, "error: ")
    assert f"error: {launcher.refusal}" in desk.log(run)
    assert not desk.run(run).path.exists(), "nothing has begun"
    table.note(launcher, "mismatch", f"`{launcher.refusal}`")


def test_every_launcher_has_a_row(table: Table) -> None:
    """Users choose a launcher by this page."""
    assert list(table.rows) == NAMES
    assert all(row.get(column) for row in table.rows.values() for column in COLUMNS)
