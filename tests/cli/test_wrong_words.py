"""Wrong words and surroundings that once got an unclear answer, or none for a minute: now one line says what to do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laststep.cli import rank
from laststep.cli.main import main
from laststep.config.errors import ConfigError
from tests.support.commands import Screen, files, launch, refusal
from tests.support.project import DEADLINE_S, PROJECT

WRONG = [
    (["submit", "status"], "submit status: two verbs; type one of them"),
    (["submit", "--nodes", "2", "status"], "submit status: two verbs; type one of them"),
    (["first", "logs"], "first: no such verb; the verb comes first: `python launch.py logs first`"),
    (["submit", "nonsense"], "nonsense: not a verb, an option or key=value; see --help"),
    (["init", "a", "b"], "b: one word too many; see --help"),
    (["launch.env.1BAD=x"], "launch.env.1BAD: no name of an environment variable; use letters, digits and '_',"),
    (["launch.env.A-B=x"], "launch.env.A-B: no name of an environment variable"),
    (["seed=9223372036854775808"], "seed=9223372036854775808: must fit into 64 bits"),
    (["train.epochs=99999999999999999999999"], "train.epochs=99999999999999999999999: must fit into 64 bits"),
    (["data.args.image_size=99999999999999999999999"], "must be a positive integer of up to 64 bits"),
    (["export", "~nobody-at-all/first", "out.pt"], "~nobody-at-all/first: no such run in runs/"),
    (["export", "first", "~nobody-at-all/out.pt"], "~nobody-at-all/out.pt: there is no folder ~nobody-at-all"),
    (["model.weights=~nobody-at-all/a.pt"], "model.weights=~nobody-at-all/a.pt: no such file"),
    (["model.name=resnet18", "model.weights=default"], "torchvision's weights are called DEFAULT, in capitals"),
    (["export", "first", "a.pt", "optim.lr=1"], "optim.lr=1: this command takes no key but launch.root"),
    (["status", "optim.lr=1"], "optim.lr=1: this command takes no key but launch.root"),
    (["model.weights=" + 300 * "x"], "xxx: no such run in "),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words)[:40] for words, _ in WRONG])
def test_wrong_words(words: list[str], says: str, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing is submitted."""
    assert says in refusal(words, capfd, here)
    assert not (slurm / "submitted.sh").exists()


def test_what_is_required(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Words that may be left out are not among those that a command lacks."""
    assert refusal(["export", "first"], capfd, here) == "the following arguments are required: OUT"


def test_largest_number(slurm: Path, here: Path) -> None:
    """A number of 64 bits is none of these."""
    assert main(["--dry-run", "seed=9223372036854775807", "launch.env._GOOD_2=x"]) == 0


def test_rank_of_no_run(here: Path) -> None:
    """`python -m laststep` takes the folder of a run, or hello; a verb is answered with what to type instead."""
    with pytest.raises(ConfigError, match=r"init: `python -m laststep` is one rank of a run; type `.* init demo`"):
        rank.main(["init", "demo"])
    with pytest.raises(ConfigError, match=re.escape("helo: no such folder of a run; did you mean hello?")):
        rank.main(["helo"])
    (here / "runs" / "first").mkdir(parents=True)
    (here / "runs" / "first" / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=re.escape("runs/frist: no such folder of a run; did you mean runs/first?")):
        rank.main(["runs/frist"])


def test_site_from_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A user who typed no --site must look at the variable."""
    monkeypatch.setenv("LASTSTEP_SITE", "nope")
    for words in (["status"], ["--dry-run"], ["doctor"]):
        assert refusal(words, capfd, here).startswith("LASTSTEP_SITE=nope: no such file")
    assert refusal(["--dry-run", "--site", "other"], capfd, here).startswith("--site other: no such file")


def test_slurm_conf_that_is_not_there(
    slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm's own commands look for the file for a minute without a word, each of them."""
    assert main(["--name", "mine"]) == 0
    capfd.readouterr()
    for name in ("sbatch", "squeue", "scancel"):
        (slurm / name).write_text("#!/bin/sh\nsleep 60\n")
        (slurm / name).chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", "/nope/slurm.conf")
    says = "SLURM_CONF=/nope/slurm.conf: no such file; correct or unset this variable"
    begun = time.monotonic()
    assert refusal(["--name", "another"], capfd, here) == says
    assert refusal(["resume", "mine"], capfd, here) == says
    assert main(["cancel", "mine"]) == 1
    assert says in capfd.readouterr().err
    assert main(["status", "mine"]) == 0
    assert "SLURM_CONF=/nope/slurm.conf: no such file" in " ".join(capfd.readouterr().out.split())
    assert time.monotonic() - begun < 30


def test_resume_without_the_permission_to_write(
    slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody else's run, or one on a read-only disk: its folder is named, not the folder of all runs. (Root, who may
    run the tests, may write anywhere, so the permission itself is what is played.)"""
    assert main(["--name", "mine"]) == 0
    (slurm / "squeue").write_text("#!/bin/sh\n")
    capfd.readouterr()
    folder = here / "runs" / "mine"
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    for way in ([], ["--local"]):
        says = refusal(["resume", "mine", *way], capfd, here)
        assert says == f"mine: you may not write to {folder}, so this run cannot continue there"


def test_on_a_narrow_terminal(here: Path) -> None:
    """On a terminal a message is wrapped between words, and the command that it names stays whole; in a pipe it is one
    line."""
    (here / "configs").unlink()
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    lines, status = Screen([sys.executable, str(PROJECT / "launch.py"), "--local"], 80, 24, env).left()
    assert status == 2 and len(lines) > 2
    assert all(len(line) <= 80 or re.fullmatch("`[^`]+`", line) for line in lines), "only the command may be longer"
    assert sum("launch.py --config mnist --local`" in line for line in lines) == 1
    assert launch("--local").stderr == " ".join(lines) + "\n"


# Found by Python at its start: raises SIGINT in this process when a certain module is first looked for.
INTERRUPTING = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "module", ["laststep", "laststep.cli.main", "argparse", "laststep.cli.submit", "omegaconf", "yaml"]
)
def test_ctrl_c_at_once(module: str, here: Path, tmp_path: Path) -> None:
    """Someone who notices a typing error presses Ctrl-C before the command has imported anything: no traceback."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(INTERRUPTING.format(module=module))
    done = subprocess.run(
        [sys.executable, PROJECT / "launch.py", "--local"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "early")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
    assert files(here) == []


def test_the_keys_are_shown_where_there_are_no_docs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An installed `laststep` has no docs/ folder: what its help names must work anywhere."""
    for show in (lambda: main(["--help"]), lambda: rank.main(["--help"])):
        with pytest.raises(SystemExit):
            show()
        shown = capfd.readouterr().out
        assert "docs/" not in shown and " --config mnist --dry-run`" in shown and "all keys with their values" in shown
    assert main(["--config", "mnist", "--dry-run"]) == 0
    assert "weight_decay:" in capfd.readouterr().out
