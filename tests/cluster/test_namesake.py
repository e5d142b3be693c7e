"""A user's own module called `trainer`: Python cannot import both it and Laststep's package."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.cluster.namesake import OURS
from laststep.commands.main import main
from tests.support.commands import refusal

SUBCLASS = "class Mine(Task):\n    pass\n"


@pytest.mark.parametrize("theirs", ["trainer.py", "trainer/loop.py"])
@pytest.mark.parametrize(
    ("task", "source", "needed"),
    [
        ("mine.Mine", "from laststep import Loop, Task\n" + SUBCLASS, "trainer.Loop"),
        ("mine.Mine", "from laststep.loop import Loop, Task\n" + SUBCLASS, "trainer.loop.Loop"),
        ("mine.Mine", "import laststep.loop\nTask = trainer.loop.Task\n" + SUBCLASS, "trainer.loop"),
        ("trainer.Mine", "", "trainer.Mine"),
    ],
)
def test_needed(
    theirs: str, task: str, source: str, needed: str, here: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One line at submission, before a job has waited in the queue to fail with an ImportError."""
    write(here, theirs, source, monkeypatch)
    said = refusal(["--dry-run", f"task={task}"], capfd, here)
    found = here / theirs.partition("/")[0]
    assert said == (
        f"task={task}: needs {needed} from {found}, but `trainer` is the name of Laststep's package ({OURS}) too; "
        "rename yours"
    )


def test_not_needed(here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many repositories have a trainer.py. As long as the task does not import it, it does no harm."""
    imports = "from laststep import Task\nfrom laststep.config.config import Config\n"
    write(here, "trainer.py", imports + SUBCLASS, monkeypatch)
    assert main(["--dry-run", "task=mine.Mine"]) == 0
    capfd.readouterr()


def write(here: Path, theirs: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put their `trainer`, and mine.py, into the folder."""
    (here / theirs).parent.mkdir(exist_ok=True)
    (here / theirs).write_text("")
    (here / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(here)
