"""The time machine: a step done again has the same bits, its samples are known without torch, and `diff` names where
two runs part."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.data.order import Order
from laststep.records.metrics import read_lines
from laststep.replay import again
from laststep.replay.used_samples import permuted
from laststep.rundir import RunDir
from laststep.runs import run_config, run_folders
from laststep.script import FILE, as_override
from laststep.submission import branch
from tests.planted.task import PLANT
from tests.support.commands import refusal
from tests.support.needs import require_package
from tests.support.project import PROJECT
from tests.support.ranks import Attempt, fingerprint, train
from tests.support.runs import config

SCRIPTS = {
    "plain": (PROJECT / "tests" / "cli" / "user_scripts" / "train.py", "--steps 10", "torch"),
    "lightning": (
        PROJECT / "examples" / "ports" / "lightning" / "ported.py",
        "--fake_images 64 --batch_size 4 --max_epochs 1 --width 8",
        "lightning",
    ),
}
WORKERS = '"WORKERS", "{}"'  # how many loader workers a script spawns
ANCHORED = ("checkpoint.anchors=5", "train.digest_every=4", "checkpoint.keep_last=1", "checkpoint.keep_best=0")


@pytest.mark.usefixtures("forked_ranks")
def test_on_fewer_ranks(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What two ranks did, one does again with the same bits, from a checkpoint that was kept for it; and the run stays
    as it was. A record that says otherwise is found: else `the same` would mean nothing."""
    run = train(config(root, "shared", 2, (*ANCHORED, "train.shares=2", "model.args.width=8")))
    before = fingerprint(run)
    assert main(["replay", str(run.path), "--step", "7", "--to", "9", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["from"], said["ranks"], said["steps"], said["digests_compared"]) == (5, 1, [7, 8, 9], 1)
    assert fingerprint(run) == before
    lines = run.metrics.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"digest"' in line and json.loads(line)["step"] == 8)
    digest = json.loads(lines[at])["digest"]
    lines[at] = lines[at].replace(digest, "0" * 16)
    run.metrics.write_text("\n".join(lines) + "\n")
    assert main(["replay", str(run.path), "--step", "8"]) == 1
    said = capfd.readouterr().out
    assert f"step   8: digest was {'0' * 16}, is {digest}" in said and "step 8: NOT the same" in said


@pytest.mark.usefixtures("forked_ranks")
def test_a_custom_loop_and_its_batch(root: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A loop of the user's own, without shares: as many ranks as did a step do it again. The batch is what rank 0's
    loop was given."""
    words = ["task=tests.support.custom_loops.example", "device=cpu", f"launch.root={root}", "launch.name=own"]
    words += ["train.digest_every=2", "checkpoint.every_steps=3", "checkpoint.keep_last=9"]
    run = train(Config.load(None, [*words, "launch.tasks_per_node=2"]))
    file = tmp_path / "batch.pt"
    assert main(["replay", str(run.path), "--step", "5", "--save-batch", str(file)]) == 0
    assert "step 5: the same" in capfd.readouterr().out
    assert torch.load(file)


@pytest.mark.usefixtures("forked_ranks")
def test_batch_norm(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A ResNet's running statistics are part of the state, and of the digest: one rank has those of two."""
    options = ("model.name=resnet18", "train.shares=2", "train.max_steps=4", "train.digest_every=1")
    run = train(config(root, "resnet", 2, (*options, "checkpoint.anchors=2")))
    assert main(["replay", str(run.path), "--step", "3", "--to", "4"]) == 0
    said = capfd.readouterr().out
    assert "from the checkpoint of step 2, 1 rank\n" in said and "the same (metrics and 2 digests)" in said


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("shares", ["4", "null"])
def test_attempts_of_other_sizes(root: Path, here: Path, shares: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps that two ranks began and one has gone on with, after a resume. With shares one rank does all of them;
    without, each is done by as many as did it, or none would come out the same."""
    saves = ("checkpoint.keep_last=1", "checkpoint.keep_best=0")
    options = (f"train.shares={shares}", "train.digest_every=1", *saves, "model.args.width=8")
    stopped = Attempt(config(root, f"sized-{shares}", 2, options), {"LASTSTEP_TEST_SIGNAL": "SIGTERM step 5 rank 1"})
    assert stopped.wait() == [143, 143], stopped.output()
    run = train(config(root, f"sized-{shares}", 1, options))
    assert [record["world_size"] for record in read_lines(run.attempts)] == [2, 1]
    assert main(["replay", str(run.path), "--step", "4", "--to", "8", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["from"], said["steps"], said["digests_compared"]) == (0, [4, 5, 6, 7, 8], 5)
    if shares == "null":
        words = ["replay", str(run.path), "--step", "8", "--nodes", "1"]
        assert "launch.nodes=1: steps 1 to 8 of sized-null were done with several" in refusal(words, capfd, here)


def without_workers(script: Path) -> str:
    """Its source without the spawned worker, which would import torch again in each process: tests/cli/test_script.py
    is about that one."""
    source = script.read_text()
    assert (WORKERS.format(1) in source) == (script == SCRIPTS["plain"][0])
    return source.replace(WORKERS.format(1), WORKERS.format(0))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["plain", "lightning"])
def test_a_script(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script of the user's own, and one that Lightning trains, from a checkpoint and on as many ranks."""
    file, words, package = SCRIPTS[name]
    require_package(package)
    (tmp_path / "train.py").write_text(without_workers(file))
    options = ["device=cpu", "train.digest_every=1", "checkpoint.anchors=4", "launch.tasks_per_node=2"]
    options += [f"launch.root={root}", f"launch.name={name}", as_override(["train.py", *words.split()])]
    monkeypatch.chdir(PROJECT)  # where the server that forks the ranks finds what it loads
    env = {FILE: str(tmp_path / "train.py")}
    run = train(Config.load(None, options), env, functools.partial(os.chdir, tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(run.path), "--step", "6", "--to", "7", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["from"], said["ranks"], said["steps"], said["digests_compared"]) == (4, 2, [6, 7], 2)


@pytest.mark.usefixtures("forked_ranks")
def test_a_script_with_trackers_of_its_own(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own calls find the run's tracker in a run, and nobody in a replay, in what `--from` does again and in `diff`,
    whatever the run's own variables say."""
    source, seen = without_workers(SCRIPTS["plain"][0]), tmp_path / "seen"
    variables = "{name: os.environ.get(name) for name in ('WANDB_RUN_ID', 'WANDB_MODE', 'TRACKIO_SPACE_ID')}"
    note = f"import json\nprint(json.dumps({variables}), file=open({str(seen)!r}, 'a'))\n"
    (tmp_path / "train.py").write_text(source.replace("run = laststep.run()\n", f"run = laststep.run()\n{note}", 1))
    options = ["device=cpu", "launch.env.WANDB_MODE=offline", "launch.env.TRACKIO_SPACE_ID=me/space"]
    options += ["track.wandb={project: p, by: script}", "train.digest_every=1", f"launch.root={root}"]
    options += [as_override(["train.py", "--steps", "4"])]
    monkeypatch.chdir(PROJECT)
    runs = []
    for number, name in enumerate(("one", "other")):
        config = Config.load(None, [*options, f"launch.name={name}", f"seed={number}"])
        env = {FILE: str(tmp_path / "train.py"), **config.launch.env}
        runs.append(train(config, env, functools.partial(os.chdir, tmp_path)))
    for each in read_lines(seen):
        assert len(each.pop("WANDB_RUN_ID")) == 12
        assert each == {"WANDB_MODE": "offline", "TRACKIO_SPACE_ID": "me/space"}
    seen.unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(runs[0].path), "--step", "3"]) == 0
    with again.up_to(runs[0], 3):
        pass
    assert main(["diff", *(str(run.path) for run in runs)]) == 1
    silent = {"WANDB_RUN_ID": None, "WANDB_MODE": "disabled", "TRACKIO_SPACE_ID": None}
    assert read_lines(seen) == [silent] * 4, capfd.readouterr()


def planted(root: Path, name: str, plant: dict[str, Any]) -> RunDir:
    """A run of two ranks with a planted difference."""
    words = ["task=tests.planted.task.Planted", "device=cpu", "train.batch_size=8", "train.epochs=1"]
    words += [f"launch.root={root}", f"launch.name={name}", "launch.tasks_per_node=2", "train.digest_every=2"]
    small = Config.load(None, words)
    launch = dataclasses.replace(small.launch, env={PLANT: json.dumps(plant)})
    return train(dataclasses.replace(small, launch=launch), launch.env)


@pytest.mark.usefixtures("forked_ranks")
def test_the_operator_is_named(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One bit of what one operator computed on rank 1 in step 3: `diff` names the step, the rank, the operator, and the
    one bit. Two runs without a difference have none."""
    note = tmp_path / "note"
    plant = {"kind": "operator", "step": 3, "rank": 1, "number": 6, "bit": 21, "element": 5, "note": str(note)}
    clean, again = (planted(root, name, {}) for name in ("clean", "again"))
    odd = planted(root, "odd", plant)
    assert main(["diff", str(clean.path), str(again.path)]) == 0
    assert "nothing differs in the 6 steps that both have done" in capfd.readouterr().out
    assert main(["diff", str(clean.path), str(odd.path), "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    operator = found["operator"]
    assert (found["step"], operator["rank"], operator["bits"]) == (3, 1, 1), found
    assert operator["a"]["operator"] == operator["b"]["operator"] == json.loads(note.read_text())["operator"]
    assert found["not_reproduced"] == []


def test_samples(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The samples of a step are those that its ranks have used, in their order; torch is not needed to name them."""
    run = train(config(root, "sampled", 2, ("train.max_steps=9", "train.accumulate=2")))
    assert main(["samples", str(run.path), "--step", "9", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    order = Order(52, 8, 0)
    for rank, part in enumerate(said["samples"]):
        expected = [int(row) for rows in order.micro_batches(8, rank, 2, 2) for row in rows]
        assert (part["rank"], part["rows"]) == (rank, expected)
    code = f"import sys; from laststep.cli.main import main; main(['samples', {str(run.path)!r}, '--step', '9']); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True, timeout=60)


@pytest.mark.parametrize("samples", [1, 2, 7, 1000])
def test_the_order_without_torch(samples: int) -> None:
    """torch.randperm is made again number by number. Another torch that has another order is noticed here."""
    whole = Order(samples, 3, 11).indices(2)
    for begin, end in ((0, samples), (samples // 3, samples // 2)):
        assert permuted(samples, 11, 2, begin, end).tolist() == whole[begin:end].tolist()


def test_refused(root: Path, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be done again is said in one line, before anything starts."""
    run = str(train(config(root, "two", 2, ("train.max_steps=2",))).path)
    assert "has done 2 steps, so there is no step 3 to replay" in refusal(["replay", run, "--step", "3"], capfd, here)
    assert "--step 0 --to 0: steps count from 1" in refusal(["replay", run, "--step", "0"], capfd, here)
    words = ["replay", run, "--step", "2", "--ranks", "1"]
    assert "two has no train.shares, so only 2 ranks can compute the same bits" in refusal(words, capfd, here)
    words = ["replay", run, "--step", "2", "--debug"]
    assert "works in one process, and step 2 of two needs 2 ranks" in refusal(words, capfd, here)
    for words, says in (
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["--profile", str(here)], f"{here}: is a folder; name a file in it"),
        (["--save-batch", "/no/where/x"], "/no/where/x: there is no folder /no/where"),
        (["--debug", "--json"], "--json --debug: the debugger has the terminal"),
        (["--keep", "/no/where/x"], "--keep /no/where/x: No such file or directory; name a new folder"),
    ):
        assert says in refusal_of(["replay", run, "--step", "2", *words], capfd)
    assert "the same run twice" in refusal(["diff", run, run], capfd, here)
    assert refusal(["diff", run], capfd, here).endswith("are required: B"), "the folder of all runs may be left out"
    untrained = RunDir(root / "untrained")
    shutil.copytree(run, untrained.path)
    untrained.metrics.unlink()
    untrained.attempts.unlink()
    said = refusal_of(["diff", run, str(untrained.path)], capfd)
    assert "two untrained: have no step that both have done, so nothing can be compared" in said
    assert "two has steps from 1 to 2" in refusal(["samples", run, "--step", "5"], capfd, here)
    for option in (["--debug"], ["--keep", "kept"], ["--ranks", "2"]):
        assert f"{option[0]} launch.nodes=1: " in refusal(
            ["replay", run, "--step", "2", "--nodes", "1", *option], capfd, here
        )
    words = ["replay", run, "--step", "2", "--nodes", "1-2"]
    assert "launch.nodes=1-2: a replay needs one number of nodes" in refusal(words, capfd, here)
    monkeypatch.setenv("PATH", str(here))
    words = ["replay", run, "--step", "2", "--nodes", "1"]
    assert "launch.nodes=1: no Slurm on this machine" in refusal(words, capfd, here)
    words = ["replay", run, "--step", "2", "optim.lr=1"]
    assert "optim.lr=1: a replay keeps the run's configuration, but for the launch.* keys" in refusal(
        words, capfd, here
    )
    assert [line["step"] for line in read_lines(RunDir(run).metrics) if "time" in line] == [1, 2]


def test_nobody_is_told() -> None:
    """A key that is missing today, or a server that is down, keeps no step from being done again."""
    words = ["track.wandb.project=p", "alert.to=[no-such-program]", "telemetry.record=always"]
    quiet: Any = again.once(Config.load(None, words))
    assert (quiet.track.wandb, quiet.alert.to, quiet.telemetry.record) == ({}, [], "auto")


def test_too_few_gpus(root: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a job's GPUs did needs as many here; else the user is told how a job does it."""
    run = train(config(root, "gpus", 1, ("train.max_steps=2", "launch.cpus_per_task=1")))
    on_gpus = dataclasses.replace(
        small := run_config.as_submitted(run),
        launch=dataclasses.replace(small.launch, gpus_per_node=64, tasks_per_node=None),
    )
    on_gpus.save(run.config)
    run.attempts.write_text(run.attempts.read_text().replace('"world_size": 1', '"world_size": 64'))
    words = ["replay", str(run.path), "--step", "2"]
    assert "gpus: step 2 needs 64 GPUs, and this machine has" in refusal(words, capfd, here)
    run_folders.record_submission(run, "12")
    said = refusal(words, capfd, here)
    assert said.count("\n") <= 1 and " --step 2 --nodes N` is a job" in said


@pytest.mark.usefixtures("forked_ranks")
def test_branch_at_any_step(root: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that begins after a step without a checkpoint ends as the first one did: that step was done again, bit for
    bit. With a sample and a step left out it differs from there on, and only from there on."""
    run = train(
        config(root, "trunk", 2, ("train.shares=2", "train.max_steps=12", "task=classification", "model.args.width=8"))
    )
    words = ["--from", f"{run.path}@6", "--dry-run", f"launch.root={root}"]
    assert main(words) == 0
    same = branched(run, root, "same")
    assert fingerprint(same) == fingerprint(run)
    others = branched(run, root, "others", "train.skip_steps=[8]", "train.skip_samples=[15]")
    lines = [{line["step"]: line for line in read_lines(one.metrics) if "time" in line} for one in (run, others)]
    assert all(lines[0][step]["loss"] == lines[1][step]["loss"] for step in range(1, 7))
    assert lines[1][8]["loss"] is None and lines[1][8]["skipped"]
    assert lines[0][12]["loss"] != lines[1][12]["loss"]
    assert "there is no step 99 to replay" in refusal_of(
        ["--from", f"{run.path}@99", "--local", f"launch.root={root}"], capfd
    )


def branched(run: RunDir, root: Path, name: str, *words: str) -> RunDir:
    """A run that branches off step 6, trained to its end."""
    from laststep.cli.submit import _copy_state

    branch_config = branch.configure(run, [f"launch.root={root}", f"launch.name={name}", *words], 6)
    with run_folders.created(branch_config) as folder:
        assert _copy_state(run, folder, 6) == 6
    return train(branch_config)


def refusal_of(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The error of a command that is refused late."""
    capfd.readouterr()
    assert main(words) == 2
    return capfd.readouterr().err
