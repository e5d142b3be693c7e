"""The configuration that a run continues with: the one that it was submitted with, or none.

A run that silently continues with another learning rate, size or length has wrong results, and nobody notices.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from submitit import SlurmJob

from laststep.checkpoint.store import STRUCTURE, CheckpointStore, Manifest, shard_name
from laststep.cli import rank
from laststep.cli.main import main
from laststep.config.config import Config, missing_keys
from laststep.config.errors import ConfigError
from laststep.records.submissions import read_submissions
from laststep.rundir import RunDir
from laststep.runs import run_config
from laststep.runs.run_config import LATER_KEYS
from laststep.submission.submission import ReadyRun
from laststep.trainer import Trainer
from tests.support.commands import refusal

WORDS = ["optim.lr=0.05", "seed=3", "train.epochs=7"]
# config.yaml as the first version of Laststep wrote it: a key that it lacks must be in LATER_KEYS.
FIRST_VERSION = Path(__file__).parent / "first_version.yaml"


@pytest.fixture
def run(slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> RunDir:
    """A run that was submitted, and whose job has left the queue."""
    assert main(["--name", "mine", *WORDS]) == 0
    capfd.readouterr()
    (slurm / "squeue").write_text("#!/bin/sh\n")
    return RunDir(here / "runs" / "mine")


def test_a_run_that_is_resumed_as_it_was(run: RunDir) -> None:
    """Its job has the configuration that has trained before. Else the retry policy would take it for a new one, and the
    first broken node of the new job would end the run."""
    assert main(["resume", "mine"]) == 0
    first, second = (line["config"] for line in read_submissions(run.submissions))
    assert first == second


def checkpoint(run: RunDir, config: str) -> None:
    """Commit a checkpoint of step 5 whose manifest has this copy of the configuration."""
    store = CheckpointStore(run.checkpoints)
    writing = store.create_writing_folder(5, "test")
    files = {name: {"bytes": 0, "sha256": "of no interest"} for name in (STRUCTURE, shard_name(0, 1))}
    for name in files:
        (writing / name).touch()
    store.commit(writing, Manifest(5, 1, 40, 1, {}, files, config=config))  # type: ignore[arg-type]


def damaged(text: str, how: str) -> str:
    """A config.yaml that a crash, or an editor, has damaged."""
    lines = text.splitlines(keepends=True)
    return {
        "empty": "",
        "half": "".join(lines[: len(lines) // 2]),
        "cut in its last line": text[:-3],
        "one key lost": text.replace("  lr: 0.05\n", ""),
        "zeros": "\0" * len(text),
    }[how]


DAMAGES = ("empty", "half", "cut in its last line", "one key lost", "zeros")


@pytest.mark.parametrize("copy_in", ["submissions.jsonl", "the checkpoint of step 5"])
def test_a_damaged_file_is_restored(run: RunDir, copy_in: str, capfd: pytest.CaptureFixture[str]) -> None:
    """From the newest copy, with a line that says so."""
    text = run.config.read_text()
    if copy_in != run.submissions.name:
        checkpoint(run, text)
        run.submissions.unlink()
    for how in DAMAGES:
        run.config.write_text(damaged(text, how))
        assert run_config.load(run) == Config.parse(text), how
        capfd.readouterr()
        assert run_config.load(run, restore=True) == Config.parse(text)
        (warning,) = capfd.readouterr().err.splitlines()
        assert re.fullmatch(f"WARNING: {run.config}: is damaged \\(.+\\); restored from its copy in {copy_in}", warning)
        assert run.config.read_text() == text


def test_a_damaged_run_is_resumed(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """The job trains with what was submitted, and with what the command changes."""
    before = Config.load(run.config)
    run.config.write_text("")
    assert main(["resume", "mine", "--nodes", "2"]) == 0
    assert "restored from its copy in submissions.jsonl" in capfd.readouterr().err
    wanted = dataclasses.replace(before, launch=dataclasses.replace(before.launch, nodes=2))
    assert Config.load(run.config) == Config.parse(read_submissions(run.submissions)[-1]["config"]) == wanted


@pytest.mark.parametrize("how", DAMAGES[:4])
def test_without_a_copy_it_is_refused(run: RunDir, how: str, capfd: pytest.CaptureFixture[str], here: Path) -> None:
    """Defaults must not take the place of what is lost, whoever starts the ranks."""
    text = run.config.read_text()
    run.config.write_text(damaged(text, how))
    run.submissions.unlink()
    says = "launch.slurm=null: must be" if how == "cut in its last line" else "is damaged"
    for verb in (["resume", "mine"], ["resume", "mine", "--local"], ["evaluate", "mine"]):
        assert says in refusal(verb, capfd, here)
    with pytest.raises(ConfigError, match=says):
        run_config.load(run)


def test_a_run_of_the_first_version(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """It has no copies, and lacks the keys that are newer: they have their defaults. No other key may be missing."""
    old = FIRST_VERSION.read_text()
    assert set(missing_keys(old)) == set(LATER_KEYS), "LATER_KEYS must name each key that was added"
    run.config.write_text(old)
    lines = [{k: v for k, v in line.items() if k != "config"} for line in read_submissions(run.submissions)]
    run.submissions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["resume", "mine"]) == 0
    assert capfd.readouterr().err == ""
    assert Config.load(run.config).optim.lr == Config.parse(old).optim.lr == 0.07
    assert not Config.load(run.config).train.deterministic, "its recorded value, not the default of today"


def older(run: RunDir) -> Config:
    """Make this run one of a version in which train.deterministic was false by default."""
    run.config.write_text(run.config.read_text().replace("deterministic: true", "deterministic: false"))
    run.submissions.unlink()
    return Config.load(run.config)


def test_the_command_of_an_older_run_is_repeated(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun or srun this continues a run. The default has changed since: the run would be refused as another
    one, or change its kernels on the way."""
    trained: list[Config] = []
    monkeypatch.setattr("laststep.cli.rank.Trainer", lambda config: lambda: trained.append(config))
    command = ["--name", "mine", "optim.lr=0.05", "device=cpu"]
    rank.main(command)
    assert trained[-1].train.deterministic
    before = older(RunDir(here / "runs" / "mine"))
    rank.main(command)
    assert trained[-1] == before and not before.train.deterministic
    with pytest.raises(ConfigError, match=r"^train.deterministic=True: mine was started with False"):
        rank.main([*command, "train.deterministic=true"])


def test_the_sweep_of_an_older_version_is_repeated(
    slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its missing runs are submitted with the values that they have recorded."""
    assert main(["sweep", "--name", "scan", "seed=0..1"]) == 0
    (slurm / "squeue").write_text("#!/bin/sh\n")
    submitted: list[Config] = []

    def hand_over(sweep: RunDir, _: Config, runs: list[ReadyRun], *__: object) -> list[SlurmJob[object]]:
        submitted.extend(one.config for one in runs)
        return [SlurmJob(sweep.logs, "4712_0")]

    monkeypatch.setattr("laststep.submission.submission.hand_over", hand_over)
    older(RunDir(here / "runs" / "scan-seed_0"))
    assert main(["sweep", "--name", "scan", "seed=0..1"]) == 0, capfd.readouterr().err
    assert [config.train.deterministic for config in submitted] == [False]


def test_a_key_that_is_newer_than_the_submission(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """The copy shows which keys there were. One that it lacks as well was not lost."""
    older = run.config.read_text().replace("  accumulate: 1\n", "")
    line = dict(read_submissions(run.submissions)[0], config=older)
    run.submissions.write_text(json.dumps(line) + "\n")
    run.config.write_text(older.replace("nodes: 1", "nodes: 2"))
    assert main(["resume", "mine"]) == 0
    assert "launch.nodes: 1 -> 2" in capfd.readouterr().err
    assert Config.load(run.config).train.accumulate == 1


def test_an_edited_file(run: RunDir, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The job may change, and the difference is shown. Of what the run consists, nothing may."""
    text = run.config.read_text()
    run.config.write_text(text.replace("time_min: 60", "time_min: 90"))
    assert main(["resume", "mine"]) == 0
    assert capfd.readouterr().err == (
        f"WARNING: {run.config}: was edited since the run was last submitted: launch.time_min: 60 -> 90\n"
    )
    assert main(["resume", "mine"]) == 0
    assert capfd.readouterr().err == "", "the edit was submitted"
    run.config.write_text(text.replace("lr: 0.05", "lr: 0.5"))
    assert "was edited: optim.lr: 0.05 -> 0.5; a run keeps these values" in refusal(["resume", "mine"], capfd, here)
    with pytest.raises(ConfigError, match=r"optim.lr: 0.05 -> 0.5"):
        run_config.load(run)
    run.config.write_text(f"# a comment\n{text.replace('time_min: 60', 'time_min: 90')}")
    run_config.load(run)
    assert capfd.readouterr().err == ""


def test_a_moved_run(run: RunDir, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its folder has another place and name. That is no edit."""
    moved = RunDir(here / "archive" / "ours")
    moved.path.parent.mkdir()
    shutil.move(run.path, moved.path)
    assert main(["resume", str(moved.path)]) == 0
    assert capfd.readouterr().err == ""


def test_a_refused_submission_changes_nothing(
    run: RunDir, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resume that Slurm refuses, or that is interrupted, leaves the configuration of the last submission."""
    text = run.config.read_text()
    (slurm / "sbatch").write_text("#!/bin/sh\necho no >&2\nexit 1\n")
    assert main(["resume", "mine", "--nodes", "2", "train.epochs=9"]) == 2
    assert run.config.read_text() == text


def finish(run: RunDir, step: int, total: int) -> None:
    """Let the run's job have trained to the end."""
    run.plan.write_text(json.dumps({"total_steps": total, "batch_size": 64}))
    record = {"attempt": 0, "job_id": "4711", "restart": 0, "hosts": ["n1"], "world_size": 1, "start": time.time()}
    record |= {"end": time.time(), "start_step": 0, "end_step": step, "reason": "finished", "lost_steps": 0}
    run.attempts.write_text(json.dumps(record) + "\n")


def test_a_finished_run(run: RunDir, slurm: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It takes no allocation, and its files stay as they are: the two ways to train on are named."""
    finish(run, 441, 441)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    (slurm / "submitted.sh").unlink()
    assert main(["resume", "mine", "--nodes", "4"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "mine: finished at 441 of 441",
        "extend python launch.py resume mine train.epochs=14",
        "branch python launch.py submit --from mine train.epochs=14 optim.lr=0.005",
    ]
    assert not (slurm / "submitted.sh").exists()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_it_is_extended(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    """The job gets the new length, which is recorded, and the schedule's new course is mentioned."""
    finish(run, 441, 441)
    assert main(["resume", "mine", "train.epochs=14"]) == 0
    said = capfd.readouterr().out
    assert "longer train.epochs: 7 -> 14; the learning rate follows the new length (optim.schedule=cosine)" in said
    assert Config.load(run.config).train.epochs == 14


@pytest.mark.parametrize(
    ("given", "total", "words", "says"),
    [
        ([], 441, ["train.epochs=7", "train.max_steps=400"], "mine ends at step 441, and can only end later"),
        ([], 441, ["train.epochs=5"], "give e.g. train.epochs=14"),
        ([], 441, ["train.max_steps=900"], "give e.g. train.epochs=14"),
        (["train.max_steps=100"], 100, ["train.epochs=9"], "give e.g. train.max_steps=200"),
        (["train.max_steps=100"], 100, ["train.max_steps=90"], "train.max_steps=90: mine ends at step 100"),
    ],
)
def test_only_a_later_end(
    slurm: Path,
    here: Path,
    capfd: pytest.CaptureFixture[str],
    given: list[str],
    total: int,
    words: list[str],
    says: str,
) -> None:
    """An end that the run has passed, or that another key prevents, would start a job for nothing."""
    assert main(["--name", "mine", *WORDS, *given]) == 0
    capfd.readouterr()
    finish(RunDir(here / "runs" / "mine"), total, total)
    assert says in refusal(["resume", "mine", *words], capfd, here)


def test_a_manifest_of_an_older_version(run: RunDir) -> None:
    """Checkpoints without a copy of the configuration can still be read."""
    checkpoint(run, "")
    path = CheckpointStore(run.checkpoints).path(5) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["config"]
    path.write_text(json.dumps(manifest))
    assert CheckpointStore(run.checkpoints).manifest(5).config == ""


def test_a_trainer_of_a_users_own_program(here: Path) -> None:
    """It writes the configuration that the run then has, which is whole."""
    config = Config.load(None, [f"launch.root={here}", "launch.name=own"])
    run = Trainer(config).run
    run.path.mkdir()
    config.save(run.config)
    assert run_config.load(run) == config
