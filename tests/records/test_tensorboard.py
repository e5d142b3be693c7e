"""TensorBoard shows one curve per run, from any number of attempts: every point of metrics.jsonl exactly once.

A point of a lost step, a gap, or a curve that begins again with every attempt would look like an event of the training,
but would only be an artifact of its log.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from laststep.checkpoint.store import CheckpointStore
from laststep.records import append_only, tensorboard_writer
from laststep.records.metrics import read_lines
from laststep.records.tensorboard_writer import TensorBoard
from laststep.rundir import RunDir
from tests.records import curves
from tests.records.curves import files, loaded, loader, on_disk
from tests.support.project import PROJECT, wait_until
from tests.support.ranks import Attempt, reasons, train
from tests.support.runs import FAULTY, config

LOG_EVERY = 3


def expected(run: RunDir, log_every: int = LOG_EVERY) -> curves.Curves:
    """The curves that TensorBoard should show."""
    return curves.expected(run, log_every)


def test_attempts_that_ended_in_different_ways(tmp_path: Path) -> None:
    """Four attempts, ended by SIGKILL of every rank, by SIGKILL of rank 0, by a stop, and by the end of the run, while
    a TensorBoard watches. The first attempt showed two points of steps that were then lost. The second was too short
    for its rank 0 to write any point, but its rescue saved one of these steps, done again."""
    drawn = config(tmp_path, "run", 2, ("task=tests.support.tasks.Drawn",))
    killed = Attempt(drawn, {"LASTSTEP_TEST_FAULT": "sleep step 13 rank 0,1"})
    for rank in (0, 1):
        killed.wait_for("fault: sleep", rank)
    run = killed.run
    wait_until(lambda: [p[1] for p in on_disk(run)["train/loss"]][-1:] == [12], "step 12 is not in TensorBoard's files")
    wait_until(CheckpointStore(run.checkpoints).path(7).exists, "step 7 was not saved")
    killed.signal(signal.SIGKILL, 0, 1)
    killed.wait()
    watching = loader(run)
    assert loaded(watching) == expected(run)
    lost = [(when, step) for when, step, _ in on_disk(run)["train/loss"] if step > 7]
    assert [step for _, step in lost] == [9, 12], "the checkpoint is of step 7"

    rescued = Attempt(config(tmp_path, "run", 2, FAULTY), {"LASTSTEP_TEST_FAULT": "kill step 4 rank 0"})
    assert rescued.wait() == [-signal.SIGKILL, 1], rescued.output()
    assert read_lines(run.metrics)[-1]["step"] == 10

    stopped = Attempt(drawn, {"LASTSTEP_TEST_FAULT": "stop step 3 rank 0"})
    stopped.wait()
    assert not set(lost) & {(when, step) for when, step, _ in on_disk(run)["train/loss"]}
    loaded(watching)

    train(drawn)
    assert reasons(run) == ["lost", "failed", "cancelled", "finished"]
    assert [step for _, step, _ in expected(run)["train/loss"]] == [3, 6, 9, 12]
    assert [step for _, step, _ in expected(run)["val/accuracy"]] == [7, 14]
    assert on_disk(run) == expected(run)
    assert loaded(loader(run)) == expected(run)
    assert loaded(watching) == expected(run), "although it has read the lost points"


def test_a_run_of_a_second(tmp_path: Path) -> None:
    """It ends before its curves are first written: rank 0 must not exit without them, and the other ranks must not
    wait."""
    run = train(config(tmp_path, "run", 2, ()))
    assert on_disk(run) == loaded(loader(run)) == expected(run)


def _die_once_the_end_is_recorded() -> None:
    attempt: Any = importlib.import_module("laststep.attempt.attempt")
    record_end = attempt.record_end

    def record_and_die(*words: Any, **more: Any) -> Any:
        record_end(*words, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    attempt.record_end = record_and_die


def test_killed_once_the_end_is_recorded(tmp_path: Path) -> None:
    """No attempt follows that could add the rest: whatever takes rank 0 from then on finds the curves complete."""
    last = Attempt(config(tmp_path, "run", 1, ()), before=_die_once_the_end_is_recorded)
    assert last.wait() == [-signal.SIGKILL], last.output()
    assert reasons(last.run) == ["finished"]
    assert on_disk(last.run) == expected(last.run)


def test_an_attempt_that_begins_with_a_validation(tmp_path: Path) -> None:
    """Its first step comes after the validation. It writes its curves all the same, and long before its end."""
    signalled = config(tmp_path, "run", 2, ("task=tests.support.tasks.Signalled",))
    Attempt(signalled, {"LASTSTEP_TEST_SIGNAL": "SIGTERM validation 2 rank 0"}).wait()
    drawn = Attempt(
        config(tmp_path, "run", 2, ("task=tests.support.tasks.Drawn",)), {"LASTSTEP_TEST_FAULT": "stop step 3 rank 0"}
    )
    assert drawn.wait() == [128 + signal.SIGTERM] * 2, drawn.output()
    assert "first step after" in drawn.output()
    drawn_steps = [step for _, step, _ in on_disk(drawn.run)["train/loss"]]
    assert drawn_steps in ([3, 6], [3, 6, 9]), "a stop does not wait for the last line; the next attempt adds it"


def metrics(steps: int, lost: bool = False) -> bytes:
    """Lines of metrics.jsonl, with an epoch every 7 steps; `lost` steps have other times."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        clock = {"samples_per_s": 50.0 + step, "time": 1e9 + step + 0.5 * lost}
        lines.append({"step": step, "epoch": (step + 6) // 7, "loss": 1 / step, "lr": 0.1, **clock})
        if step % 7 == 0:
            lines.append({"epoch": step // 7, "step": step, "train_loss": 0.5, "val_loss": None, "val_accuracy": 0.9})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def attempt(run: RunDir, lines: bytes, log_every: int = LOG_EVERY) -> None:
    """An attempt that writes these metrics, and every point of them."""
    run.metrics.write_bytes(lines)
    TensorBoard(run, log_every, writes=True).complete()


def test_an_epoch_at_the_step_of_the_last_point(run: RunDir) -> None:
    """A stop between that step and the epoch's validation. If the header of the next file dropped all points from that
    step on, the step's own point would be lost."""
    attempt(run, metrics(21)[: metrics(21).rindex(b'{"epoch": 3')])
    attempt(run, metrics(21))
    assert len(files(run)) == 2
    assert on_disk(run) == loaded(loader(run)) == expected(run)


@settings(deadline=None)
@given(
    attempts=st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=5),
    damage=st.sampled_from(["torn", "flipped", "zeros", "emptied", "deleted", "garbage", "nothing"]),
    where=st.tuples(st.integers(0), st.integers(0)),
)
def test_any_damage(attempts: list[tuple[int, bool]], damage: str, where: tuple[int, int]) -> None:
    """Attempts of any length, some with steps that are lost and done again, and then damage to one file, as by a power
    cut or a user: the next attempt restores the curve."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder)
        for steps, lost in attempts:
            attempt(run, metrics(steps, lost))
        if there := files(run):
            path = there[where[0] % len(there)]
            content = path.read_bytes()
            place = where[1] % (len(content) + 1)
            if damage == "deleted":
                path.unlink()
            else:
                flipped = bytes(255 - byte for byte in content[place : place + 1])
                end = {
                    "torn": b"",
                    "flipped": flipped + content[place + 1 :],
                    "zeros": bytes(len(content) - place),
                    "garbage": content[place:] + b"garbage",
                    "nothing": content[place:],
                }
                path.write_bytes(b"" if damage == "emptied" else content[:place] + end[damage])
        attempt(run, metrics(23))
        assert on_disk(run) == loaded(loader(run)) == expected(run)


def test_deleted_folder(run: RunDir) -> None:
    """A user deleted it to make room: the next attempt writes the whole curve again."""
    attempt(run, metrics(10))
    shutil.rmtree(run.tensorboard)
    attempt(run, metrics(15))
    assert on_disk(run) == expected(run)


def test_another_log_every(run: RunDir) -> None:
    """A resumed run has another train.log_every. A curve that is dense in one part and sparse in another would look
    like a change in the training."""
    attempt(run, metrics(20))
    attempt(run, metrics(25), log_every=5)
    assert on_disk(run) == loaded(loader(run)) == expected(run, log_every=5)


def test_nothing_is_written_twice(run: RunDir) -> None:
    """Writing the whole curve again at every attempt would be slow in a long run."""
    attempt(run, metrics(20))
    before = files(run)[0].read_bytes()
    attempt(run, metrics(30))
    assert files(run)[0].read_bytes() == before
    assert on_disk(run) == expected(run)


def hparams_of(run: RunDir) -> tuple[dict[str, Any], int | None]:
    """What TensorBoard's tab HPARAMS reads for a run: its values, and its status if that is written."""
    found = EventAccumulator(str(run.tensorboard)).Reload().PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG])
    end = found.get(metadata.SESSION_END_INFO_TAG)
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    return values, end and metadata.parse_session_end_info_plugin_data(end).status


def test_the_runs_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the tab HPARAMS, with the varied keys alone. It is not lost to damage, nor written twice."""
    varied = {"optim.lr": 0.1, "seed": 3, "train.amp": True, "model.name": "resnet18", "data.root": None}
    (tmp_path / "scan" / "logs").mkdir(parents=True)
    lines = [{"run": "scan-other", "optim.lr": 7}, {"run": "scan-mine", **varied}]
    (tmp_path / "scan" / "sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = RunDir(tmp_path / "scan-mine")
    run.path.mkdir()
    run.logs.symlink_to("../scan/logs")
    run.metrics.write_bytes(metrics(10))
    monkeypatch.setattr(tensorboard_writer, "EVERY_S", 0.001)
    writer = TensorBoard(run, LOG_EVERY, writes=True)
    writer.start()
    path = run.tensorboard / tensorboard_writer.HPARAMS
    until(path.exists, "the values")
    writer.end()
    writer._thread.join(60)
    values = {**varied, "seed": 3.0, "data.root": "None"}
    assert hparams_of(run) == (values, None), "still running"
    path.write_bytes(path.read_bytes()[:-3])
    attempt(run, metrics(15))
    assert hparams_of(run) == (values, api_pb2.STATUS_SUCCESS)
    assert files(run)[0] == path, "a TensorBoard that reads the curves never returns to an earlier file"
    before = path.read_bytes()
    attempt(run, metrics(15))
    assert path.read_bytes() == before
    assert {tag: curve for tag, curve in on_disk(run).items() if "_hparams_" not in tag} == expected(run)


def test_a_run_of_its_own(run: RunDir) -> None:
    """It varies nothing, and would be an empty line in the tab."""
    attempt(run, metrics(10))
    assert not (run.tensorboard / tensorboard_writer.HPARAMS).exists()


def test_files_of_others(run: RunDir) -> None:
    """A task may write its own event files in the folder."""
    attempt(run, metrics(5))
    other = run.tensorboard / "events.out.tfevents.1700000000.host.1.0"
    other.write_bytes(b"other")
    attempt(run, metrics(10, lost=True))
    assert other.read_bytes() == b"other"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds; fail after 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.001)


def test_a_full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one line in the log. The training continues, and once there is room again the curve is complete."""
    monkeypatch.setattr(tensorboard_writer, "EVERY_S", 0.001)
    run.metrics.write_bytes(metrics(500))
    said: list[str] = []
    monkeypatch.setattr(tensorboard_writer, "say", said.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        writer = TensorBoard(run, LOG_EVERY, writes=True)
        writer.start()
        until(lambda: said, "a warning")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.complete()
    assert len(said) == 1 and said[0].startswith("WARNING: [Errno 27] File too large; training continues")
    assert on_disk(run) == loaded(loader(run)) == expected(run)


def test_the_last_copy_insists(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt follows that would add what an error of the disk kept out of it."""
    append, refused = append_only.append, iter([True, False])

    def append_later(path: Path, data: bytes) -> None:
        if next(refused, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        append(path, data)

    monkeypatch.setattr("laststep.records.tensorboard_writer.append", append_later)
    attempt(run, metrics(21))
    assert on_disk(run) == loaded(loader(run)) == expected(run)


def test_deleted_while_it_is_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is deleted during an attempt, which then writes the whole curve again."""
    monkeypatch.setattr(tensorboard_writer, "EVERY_S", 0.001)
    run.metrics.write_bytes(metrics(10))
    writer = TensorBoard(run, LOG_EVERY, writes=True)
    writer.start()
    until(lambda: files(run) and on_disk(run) == expected(run), "the first points")
    shutil.rmtree(run.tensorboard)
    with run.metrics.open("ab") as file:
        file.write(metrics(20).removeprefix(metrics(10)))
    writer.complete()
    assert on_disk(run) == expected(run)


def test_a_stop_waits_for_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop while a long curve is still being compared: the thread leaves the rest to the next attempt, and cuts
    nothing that it has not compared."""
    attempt(run, metrics(2000))
    before = files(run)[0].read_bytes()
    monkeypatch.setattr(tensorboard_writer, "EVERY_S", 0.0)
    monkeypatch.setattr(tensorboard_writer, "PAUSE_S", 60.0)
    run.metrics.write_bytes(metrics(3000))
    writer = TensorBoard(run, LOG_EVERY, writes=True)
    writer.start()
    until(lambda: writer._points is None and writer._path is not None, "the comparison")
    writer.end()
    writer._thread.join(60)
    assert not writer._thread.is_alive()
    assert [path.read_bytes() for path in files(run)] == [before]


def test_a_stop_of_a_young_attempt(run: RunDir) -> None:
    """It must not begin to import tensorboard when it is about to exit."""
    run.metrics.write_bytes(metrics(10))
    writer = TensorBoard(run, LOG_EVERY, writes=True)
    writer.start()
    writer.end()
    writer._thread.join(60)
    assert not writer._thread.is_alive() and not run.tensorboard.exists()


def test_without_tensorboard(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment made by hand may lack tensorboard; training works without it."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    said: list[str] = []
    monkeypatch.setattr(tensorboard_writer, "say", said.append)
    attempt(run, metrics(10))
    assert len(said) == 1 and said[0].startswith("no curves for TensorBoard: import of tensorboard")
    assert not run.tensorboard.exists()


def test_tensorflow_stays_out(tmp_path: Path) -> None:
    """Where tensorflow is installed, most of tensorboard imports it, which takes seconds and GPU memory."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    (tmp_path / "metrics.jsonl").write_bytes(metrics(10))
    code = """
        import sys
        from laststep.records.tensorboard_writer import TensorBoard
        from laststep.rundir import RunDir
        assert "tensorboard" not in sys.modules
        TensorBoard(RunDir(sys.argv[1]), 3, writes=True).complete()
        assert "tensorboard" in sys.modules and "tensorflow" not in sys.modules
    """
    path = os.pathsep.join([str(tmp_path), str(PROJECT)])
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, check=True
    )
    assert on_disk(RunDir(tmp_path)) == expected(RunDir(tmp_path))


def test_a_worker_that_is_forked_while_tensorboard_is_imported(tmp_path: Path) -> None:
    """A module that is half imported at a fork stays so in the child. A loader's worker that imports tensorboard, or a
    module that tensorboard imports, would wait forever, and the run for its worker."""
    (tmp_path / "tensorboard.py").write_text(
        "import time; from pathlib import Path; Path('begun').touch(); time.sleep(2)"
    )
    (tmp_path / "metrics.jsonl").touch()
    code = """
        import multiprocessing, time
        from pathlib import Path
        from laststep.records.tensorboard_writer import TensorBoard
        from laststep.rundir import RunDir
        import laststep.records.tensorboard_writer as module

        def work():
            import tensorboard

        module.EVERY_S = 0.0
        TensorBoard(RunDir(Path()), 3, writes=True).start()
        while not Path("begun").exists():
            time.sleep(0.001)
        worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        worker.start()
        worker.join(60)
        assert worker.exitcode == 0, worker
    """
    path = os.pathsep.join([str(tmp_path), str(PROJECT)])
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True
    )
