"""TensorBoard shows the one curve of a run, however many attempts made it: every point of metrics.jsonl, each once.

A point of a step that was lost and done again, a gap, or a curve that begins anew with every attempt would have a user
see in the training what is only in its log.
"""

from __future__ import annotations

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

import trainer.observe
from tests.support import curves
from tests.support.curves import files, loaded, loader, on_disk
from tests.support.project import PROJECT
from tests.support.ranks import Attempt, reasons, train
from tests.support.runs import FAULTY, config
from trainer.observe import tensorboard
from trainer.observe.tensorboard import TensorBoard
from trainer.records.metrics import read_lines
from trainer.rundir import RunDir

LOG_EVERY = 3


def expected(run: RunDir, log_every: int = LOG_EVERY) -> curves.Curves:
    """What TensorBoard should show."""
    return curves.expected(run, log_every)


def test_whatever_ended_an_attempt(tmp_path: Path) -> None:
    """Four attempts, ended by SIGKILL of every rank, by that of rank 0, by a stop, and by the end of the run, and a
    TensorBoard that looks on. The first showed two points of steps that were lost. The second, too short for its rank 0
    to write any, kept one of them as it had done it anew."""
    drawn = config(tmp_path, "run", 2, ("task=tests.support.tasks.Drawn",))
    killed = Attempt(drawn, {"LASTSTEP_TEST_FAULT": "sleep step 13 rank 0,1"})
    for rank in (0, 1):
        killed.wait_for("fault: sleep", rank)
    killed.signal(signal.SIGKILL, 0, 1)
    killed.wait()
    run = killed.run
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
    assert loaded(watching) == expected(run), "it saw the points that were lost"


def test_a_run_of_a_second(tmp_path: Path) -> None:
    """It is over before its curves are first written: its process must not leave without them, and a rank that does
    not write them must not wait."""
    run = train(config(tmp_path, "run", 2, ()))
    assert on_disk(run) == loaded(loader(run)) == expected(run)


def test_an_attempt_that_begins_with_a_validation(tmp_path: Path) -> None:
    """Then its first step is not the first that it does; it writes its curves all the same, and long before its end."""
    signalled = config(tmp_path, "run", 2, ("task=tests.support.tasks.Signalled",))
    Attempt(signalled, {"LASTSTEP_TEST_SIGNAL": "SIGTERM validation 2 rank 0"}).wait()
    drawn = Attempt(
        config(tmp_path, "run", 2, ("task=tests.support.tasks.Drawn",)), {"LASTSTEP_TEST_FAULT": "stop step 3 rank 0"}
    )
    assert drawn.wait() == [128 + signal.SIGTERM] * 2, drawn.output()
    assert "first step after" in drawn.output()
    assert [step for _, step, _ in on_disk(drawn.run)["train/loss"]] == [3, 6, 9]


def metrics(steps: int, lost: bool = False) -> bytes:
    """Lines of metrics.jsonl, an epoch every 7 steps; of steps that are `lost` the times are others."""
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
    """One that leaves these metrics, and comes to write every point of them."""
    run.metrics.write_bytes(lines)
    TensorBoard(run, log_every, writes=True).complete()


def test_an_epoch_at_the_step_of_the_last_point(run: RunDir) -> None:
    """A stop came after that step and before the epoch's validation. To forget all from there on, as TensorBoard is
    told at the beginning of the next file, would take the step's own point away."""
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
def test_whatever_stands_there(attempts: list[tuple[int, bool]], damage: str, where: tuple[int, int]) -> None:
    """Attempts that come so far, some of whose steps are done otherwise by the next, and then damage to one file, as
    of a power cut or a hand: whatever is found, what comes out is the curve."""
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
    """Someone made room: the curve is there again, whole."""
    attempt(run, metrics(10))
    shutil.rmtree(run.tensorboard)
    attempt(run, metrics(15))
    assert on_disk(run) == expected(run)


def test_another_distance_between_points(run: RunDir) -> None:
    """train.log_every of a resumed run is another: a curve that is dense here and sparse there looks like a change."""
    attempt(run, metrics(20))
    attempt(run, metrics(25), log_every=5)
    assert on_disk(run) == loaded(loader(run)) == expected(run, log_every=5)


def test_what_was_written_is_written_no_more(run: RunDir) -> None:
    """After a stop, an attempt that writes the whole curve again would do so at every attempt of a long run."""
    attempt(run, metrics(20))
    before = files(run)[0].read_bytes()
    attempt(run, metrics(30))
    assert files(run)[0].read_bytes() == before
    assert on_disk(run) == expected(run)


def test_files_of_others(run: RunDir) -> None:
    """A task may write there what it likes to show, under a name of its own."""
    attempt(run, metrics(5))
    other = run.tensorboard / "events.out.tfevents.1700000000.host.1.0"
    other.write_bytes(b"other")
    attempt(run, metrics(10, lost=True))
    assert other.read_bytes() == b"other"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for it."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.001)


def test_a_full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs one line, and neither the training nor, once there is room again, a point of the curve."""
    monkeypatch.setattr(tensorboard, "EVERY_S", 0.001)
    run.metrics.write_bytes(metrics(500))
    said: list[str] = []
    monkeypatch.setattr(tensorboard, "say", said.append)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        writer = TensorBoard(run, LOG_EVERY, writes=True)
        writer.start()
        until(lambda: said, "a warning")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.complete()
    assert len(said) == 1 and said[0].startswith("WARNING: [Errno 27] File too large; training goes on")
    assert on_disk(run) == loaded(loader(run)) == expected(run)


def test_deleted_while_it_is_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is gone under a running attempt: it writes the whole curve again."""
    monkeypatch.setattr(tensorboard, "EVERY_S", 0.001)
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
    """It comes while a long curve is still being compared: the thread leaves the rest to the next attempt, and cuts
    nothing that it has not looked at."""
    attempt(run, metrics(2000))
    before = files(run)[0].read_bytes()
    monkeypatch.setattr(tensorboard, "EVERY_S", 0.0)
    monkeypatch.setattr(tensorboard, "PAUSE_S", 60.0)
    run.metrics.write_bytes(metrics(3000))
    writer = TensorBoard(run, LOG_EVERY, writes=True)
    writer.start()
    until(lambda: writer._points is None and writer._path is not None, "the comparison")
    writer.end()
    writer._thread.join(60)
    assert not writer._thread.is_alive()
    assert [path.read_bytes() for path in files(run)] == [before]


def test_a_stop_of_a_young_attempt(run: RunDir) -> None:
    """It must not begin to import tensorboard while it is to leave."""
    run.metrics.write_bytes(metrics(10))
    writer = TensorBoard(run, LOG_EVERY, writes=True)
    writer.start()
    writer.end()
    writer._thread.join(60)
    assert not writer._thread.is_alive() and not run.tensorboard.exists()


def test_without_tensorboard(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that was made by hand may lack it: that is no reason not to train."""
    monkeypatch.delitem(sys.modules, "trainer.observe.events", raising=False)
    monkeypatch.delattr(trainer.observe, "events", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    said: list[str] = []
    monkeypatch.setattr(tensorboard, "say", said.append)
    attempt(run, metrics(10))
    assert len(said) == 1 and said[0].startswith("no curves for TensorBoard: import of tensorboard")
    assert not run.tensorboard.exists()


def test_tensorflow_stays_out(tmp_path: Path) -> None:
    """Where it is installed, tensorboard imports it at the least occasion: seconds of work, and memory of the GPU."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    (tmp_path / "metrics.jsonl").write_bytes(metrics(10))
    code = """
        import sys
        from trainer.observe.tensorboard import TensorBoard
        from trainer.rundir import RunDir
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
    """A module that is half imported at a fork stays so in the child: a loader's worker that wants it too, tensorboard
    or whatever that imports, would wait for ever, and the run for its worker."""
    (tmp_path / "tensorboard.py").write_text(
        "import time; from pathlib import Path; Path('begun').touch(); time.sleep(2)"
    )
    (tmp_path / "metrics.jsonl").touch()
    code = """
        import multiprocessing, time
        from pathlib import Path
        from trainer.observe.tensorboard import TensorBoard
        from trainer.rundir import RunDir
        import trainer.observe.tensorboard as module

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
