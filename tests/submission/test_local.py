"""--local: the same Trainer as processes on this machine, and what the user sees on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from laststep.config.config import PACKAGED
from laststep.data.catalog import MNIST_5K
from laststep.ranks.disk import lock_holder
from laststep.records.append_only import append_line
from laststep.records.attempt_record import read_attempts
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir
from tests.support.commands import LONG, Terminal, begin, children, end, files, ranks_of, refusal
from tests.support.forked import forked_python
from tests.support.images import make_folder
from tests.support.project import DEADLINE_S, PROJECT, read_until, wait_until
from tests.support.ranks import fingerprint, reasons

TINY = ("data.name=fake", "data.args.samples=64", "data.args.image_size=8", "train.batch_size=16", "train.epochs=1")


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "runs")


@pytest.fixture
def plain(tmp_path: Path) -> Terminal:
    """A terminal where Python itself is started, for tests of what the kernel does with it and with its ranks."""
    return Terminal(tmp_path / "runs", sys.executable)


def test_two_nodes_on_one_machine(terminal: Terminal) -> None:
    """The ranks of two nodes, the fewest of the range, run here; the terminal shows progress and the result."""
    said = terminal.types("--local", "--nodes", "2-4", "--name", "two", *TINY, "train.batch_size=24")
    assert "step 3/3" in said
    assert "importing torch" in said, "seconds of silence look like a hang"
    *_, result, saved, export, report = said.splitlines()
    assert "finished: epoch 1  step 3" in result and "val_accuracy" in result
    two = terminal.run("two")
    assert Path(PROJECT, saved.removeprefix("saved  ")).resolve() == two.checkpoints / "step_000000003"
    assert "launch.py export " in export and "launch.py report " in report
    assert terminal.run("two").config.exists()
    (attempt,) = read_lines(terminal.run("two").attempts)
    assert attempt["world_size"] == 2 and attempt["reason"] == "finished"
    assert len(list(terminal.run("two").logs.glob("*_log.out"))) == 2


def test_a_bar_on_a_terminal(terminal: Terminal) -> None:
    """A terminal gets a progress bar; log files and pipes get plain lines without control characters."""
    screen, typed = os.openpty()
    command = [
        terminal.python,
        "launch.py",
        "--local",
        "--name",
        "seen",
        *LONG,
        "train.max_steps=90",
        "train.log_every=5",
    ]
    with subprocess.Popen(
        [*command, f"launch.root={terminal.root}"], cwd=PROJECT, env=terminal.env, stdout=typed, stderr=typed
    ) as launcher:
        os.close(typed)
        shown = b""
        with contextlib.suppress(OSError):  # EIO, when the launcher has closed it
            while data := os.read(screen, 65536):
                shown += data
    os.close(screen)
    assert launcher.returncode == 0, shown.decode(errors="replace")
    assert b"step 90/90" in shown and re.search(rb"\x1b\[.*\d+/90", shown), "plain lines, and a bar"
    (log,) = RunDir(terminal.root / "seen").logs.glob("*_log.out")
    assert b"\x1b" not in log.read_bytes()
    assert "\x1b" not in terminal.types("--local", "--name", "piped", *TINY)


def test_ctrl_c_is_a_stop(terminal: Terminal) -> None:
    """Ctrl-C keeps every step, exits 130 and prints the resume command, which then continues the run."""
    launcher = terminal.starts("--local", "--tasks-per-node", "2", "--name", "stopped", "data.workers=1", *LONG)
    terminal.waits_for_step("stopped")
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130, said
    assert re.search(r"stopped after step \d+, every step is saved\nnext   .* resume \S*stopped --local", said)
    (attempt,) = read_lines(terminal.run("stopped").attempts)
    assert attempt["reason"] == "cancelled" and attempt["lost_steps"] == 0
    lines = fingerprint(terminal.run("stopped"))
    assert lines["step"] == attempt["end_step"] == lines["metrics"][-1]["step"]

    resumed = terminal.starts("resume", "stopped", "--local")
    deadline = time.monotonic() + DEADLINE_S
    while read_lines(terminal.run("stopped").metrics)[-1]["step"] <= attempt["end_step"]:
        assert time.monotonic() < deadline and resumed.poll() is None, "the resumed run did not continue"
        time.sleep(0.02)
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 143


def test_ctrl_c_ends_a_sweep(terminal: Terminal) -> None:
    """It stops the present run, which keeps its steps, and starts no other; the same command again continues there.
    Values are shown as they were typed: someone who typed 1e9 would not look for lr_1000000000.0."""
    words = ("sweep", "--local", "--name", "scan", "optim.lr=1e-9,1E-8", *LONG)
    first = terminal.run("scan-lr_1e-9")
    for attempt in (1, 2):
        launcher, before = terminal.starts(*words), len(read_lines(first.metrics))
        wait_until(partial(_has_more_lines, first.metrics, before), "no step")
        launcher.send_signal(signal.SIGINT)
        said, _ = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 130, said
        assert "sweep  scan: 2 runs, 2 to do, one after another on this machine\n" in said
        assert "2 runs of sweep scan left; to continue, type it again with --name scan" in said
        assert [record["lost_steps"] for record in read_lines(first.attempts)] == [0] * attempt
    assert not terminal.run("scan-lr_1E-8").path.exists()
    assert "  1e-9  " in terminal.types("status", "--sweep", "scan")


def _has_more_lines(file: Path, lines: int) -> bool:
    return len(read_lines(file)) > lines


def test_a_run_of_a_sweep_fails(terminal: Terminal) -> None:
    """The next one follows: a night of runs must not end with the first. Exit status 1, and again only what failed."""
    words = ("sweep", "--local", "--name", "scan", "task=tests.support.tasks.Broken,classification", *TINY)
    said = terminal.types(*words, "launch.max_failures=0", status=1)
    assert "\nsweep  scan: 1 finished, 1 failed: scan-task_tests.support.tasks.Broken\n" in said
    again = terminal.types(*words, "launch.max_failures=0", status=1)
    assert "sweep  scan: 2 runs, 1 to do, " in again and "\nsweep  scan: 0 finished, 1 failed: " in again


def smoke(folder: Path, *words: str, status: int = 0) -> str:
    """What --smoke says in a folder that has configurations and nothing else: it copies the folder where it is typed,
    and this project's takes longer than the training."""
    (folder / "configs").symlink_to(PACKAGED)
    said = "".join(end(begin(folder, [forked_python(), str(PROJECT / "launch.py"), "--smoke", *words]), status))
    assert files(folder) == [], "nothing is left of it"
    return said


def test_smoke(tmp_path: Path) -> None:
    """Steps, a save, a resume and a validation before a night of training; nothing is left of it."""
    said = smoke(tmp_path, "--tasks-per-node", "2", *TINY)
    assert said.startswith(
        "smoke  trained to step 2 and saved, resumed, trained to step 4\n       validation batches: 3; 2 ranks, "
    )


def test_smoke_of_a_custom_loop(terminal: Terminal) -> None:
    """It has an end of its own, which may be far: it is stopped after a few steps, and resumes in between."""
    said = terminal.types("--smoke", "task=tests.support.custom_loops.careful")
    assert said.startswith("smoke  trained to step 2 and saved, resumed, trained to step ")


def test_smoke_fails(tmp_path: Path) -> None:
    """The last lines are the error, and where in the user's code it is."""
    said = smoke(tmp_path, "task=tests.support.tasks.Broken", *TINY, status=1)
    *_, error, place = said.splitlines()
    assert error.startswith("smoke  fails at its start: ") and error.endswith("ValueError: a bad sample")
    assert place.startswith("at     tasks.py, line ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--debug"], "--smoke --debug: --smoke trains a new run on this machine; leave --debug out"),
        (["--dry-run"], "--smoke --dry-run: --smoke leaves nothing behind"),
        (["optim.lrr=1"], "optim.lrr: no such key"),
    ],
)
def test_smoke_refused(words: list[str], said: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, before torch is imported."""
    assert said in refusal(["--smoke", *words], capfd, here)


def test_a_model_that_must_learn_two_batches(terminal: Terminal) -> None:
    """train.overfit_batches: each epoch has those two, and validation is as ever."""
    terminal.types("--local", "--name", "few", *TINY, "train.epochs=3", "train.overfit_batches=2")
    lines = read_lines(terminal.run("few").metrics)
    assert [line["epoch"] for line in lines if "loss" in line] == [1, 1, 2, 2, 3, 3]
    assert sum("val_loss" in line for line in lines) == 3
    refused = terminal.types("--local", "task=examples.custom_loop.main", "train.overfit_batches=2", status=2)
    assert "train.overfit_batches: task=examples.custom_loop.main does not read it" in refused
    refused = terminal.types("train.overfit_batches=2", "train.epoch_samples=9", status=2)
    assert "train.epoch_samples=9: with train.overfit_batches an epoch is" in refused


def test_cancel(terminal: Terminal) -> None:
    """From another terminal: an orderly stop, and the command waits until the run has ended."""
    launcher = terminal.starts("--local", "--name", "mine", "--tasks-per-node", "2", *LONG)
    terminal.waits_for_step("mine")
    said = terminal.types("cancel", "mine")
    assert re.search(r"mine: stopped after step \d+, every step is kept\nnext   .* resume \S*mine\n", said)
    launcher.communicate(timeout=DEADLINE_S)
    run = terminal.run("mine")
    assert reasons(run) == ["cancelled"] and read_lines(run.attempts)[0]["lost_steps"] == 0
    assert "cancelled, so there is nothing to cancel" in terminal.types("cancel", "mine")


def test_second_ctrl_c_kills(plain: Terminal) -> None:
    """A user who cannot wait gets the terminal back, even when a rank is stuck."""
    launcher = plain.starts("--local", "--name", "stuck", *LONG)
    plain.waits_for_step("stuck")
    (rank,) = ranks_of(launcher)
    os.kill(rank, signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    read_until(launcher, "Ctrl-C again to kill")
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert not Path(f"/proc/{rank}").exists(), "no rank is left behind"
    assert re.search(r"killed after step \d+, before the first checkpoint: nothing is saved\nnext   .*", said)


def test_a_printed_step_is_counted(plain: Terminal) -> None:
    """A user who has read `step 3304` must find it in metrics.jsonl, and it must count as lost, if all ranks are
    killed a moment later: the line of a step is printed once the step is in the file."""
    endless = ("train.epochs=9999", "train.log_every=1", "checkpoint.every_steps=30", "launch.max_restarts=0")
    launcher = plain.starts("--local", "--name", "dead", *TINY, *endless)
    before = read_until(launcher, "saved step 30")
    for rank in ranks_of(launcher):
        os.kill(rank, signal.SIGKILL)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    printed = max(map(int, re.findall(r" step (\d+)/", f"{before}{said}")))
    (record,) = read_lines(plain.run("dead").attempts)
    assert record["reason"] == "lost" and record["end_step"] >= printed, (record, printed)
    in_file = {line["step"] for line in read_lines(plain.run("dead").metrics)}
    assert printed in in_file and record["end_step"] - record["lost_steps"] >= 30


def test_a_refused_resume_hides_no_attempt(plain: Terminal) -> None:
    """A run that trained and was killed with its command has trained, and is lost, whatever was typed since: `status`
    said that it `ended before its ranks were up`, and that its attempt lasted until now."""
    launcher = plain.starts("--local", "--name", "gone", *LONG)
    plain.waits_for_step("gone")
    for rank in ranks_of(launcher):
        os.kill(rank, signal.SIGKILL)
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_S)
    run = plain.run("gone")
    wait_until(lambda: lock_holder(run.lock) is None, "the ranks live")
    assert read_attempts(run.attempt_now), "nobody has recorded its end"
    done = read_lines(run.metrics)[-1]["step"]
    # A start whose ranks never came up, because they were refused.
    append_line(run.submissions, json.dumps({"job_id": "local-20991122-080000-1", "time": time.time()}))
    os.utime(run.metrics, (0, time.time() + 3600))  # the attempt lasted until its last sign, not until now
    said = plain.types("status", "gone")
    assert re.search(rf"\n +0  lost +0 to {done} +{done} ", said) and "  1h 0" in said, said
    assert "the start after that attempt ended before its ranks were up" in said, said


def test_ctrl_c_before_anything_is_up(plain: Terminal) -> None:
    """A signal in the first milliseconds of a rank must stop it, not kill it while Python still imports."""
    launcher = plain.starts("--local", "--tasks-per-node", "2", "--name", "early", *LONG)
    deadline = time.monotonic() + DEADLINE_S
    while len(ranks_of(launcher)) < 2:
        assert time.monotonic() < deadline and launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130, said
    assert reasons(plain.run("early")) == ["cancelled"]


def test_a_killed_launcher_stops_its_ranks(plain: Terminal) -> None:
    """Ranks whose launcher was killed save and end; they neither train on unseen nor lose steps."""
    launcher = plain.starts("--local", "--tasks-per-node", "2", "--name", "orphans", *LONG)
    plain.waits_for_step("orphans")
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while not read_lines(plain.run("orphans").attempts):
        assert time.monotonic() < deadline, "the ranks did not end"
        time.sleep(0.02)
    (attempt,) = read_lines(plain.run("orphans").attempts)
    assert attempt["reason"] == "failed" and attempt["lost_steps"] == 0, "nobody has cancelled it"
    assert attempt["error"] == "the command that started the ranks was killed"
    assert fingerprint(plain.run("orphans"))["step"] == attempt["end_step"]


def test_a_killed_supervisor_does_not_end_the_run(plain: Terminal) -> None:
    """The OOM killer takes the parent of a rank. The rank stops in an orderly way, and all start again; recorded as
    cancelled, the run would wait for its user."""
    launcher = plain.starts("--local", "--tasks-per-node", "2", "--name", "parent", *LONG)
    plain.waits_for_step("parent")
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    wait_until(lambda: read_lines(plain.run("parent").attempts), "the ranks did not end")
    (attempt, *_) = read_lines(plain.run("parent").attempts)
    wait_until(lambda: len(ranks_of(launcher)) == 2, "the ranks did not start again")
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=DEADLINE_S)
    assert (attempt["reason"], attempt["lost_steps"], attempt["requeue"]) == ("failed", 0, True)
    assert attempt["error"] == "the parent process of a rank was killed"


def test_nohup(plain: Terminal) -> None:
    """A run started with nohup survives the closing of its plain."""
    command = [sys.executable, "launch.py", "--local", "--name", "nohup", f"launch.root={plain.root}", *TINY]
    launcher = subprocess.Popen(
        ["nohup", *command], cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + DEADLINE_S
    while not ranks_of(launcher):
        assert time.monotonic() < deadline and launcher.poll() is None
    launcher.send_signal(signal.SIGHUP)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, said.decode()


def test_a_killed_rank_is_started_again(terminal: Terminal) -> None:
    """A rank is killed in the fifth step of every attempt: all ranks start again, in the same logs, until the run is
    complete, and no step is lost."""
    words = (*TINY, "train.epochs=3", "task=tests.support.tasks.Faulty", "launch.max_restarts=1")
    fault = "launch.env.LASTSTEP_TEST_FAULT=kill step 5 rank 1"
    said = terminal.types("--local", "--tasks-per-node", "2", "--name", "again", *words, fault)
    assert said.count("restarting the ranks after a fault") == 2 and said.count("finished: epoch 3  step 12") == 1
    attempts = read_lines(terminal.run("again").attempts)
    assert [(end["reason"], end["step_restarts"], end["requeue"]) for end in attempts] == [
        ("failed", 0, True), ("failed", 1, True), ("finished", 2, False)
    ]  # fmt: skip
    assert len({end["job_id"] for end in attempts}) == 1 and sum(end["lost_steps"] for end in attempts) == 0
    assert attempts[0]["blamed"] == attempts[0]["hosts"], "the host of the rank that was killed"
    assert len(list(terminal.run("again").logs.glob("*_log.out"))) == 2
    steps = [line["step"] for line in read_lines(terminal.run("again").metrics) if "loss" in line]
    assert steps == list(range(1, 13))


def test_a_killed_rank_ends_the_run(terminal: Terminal) -> None:
    """When one rank is killed (out of memory) the others and the command end too, with status 1 and the rank's name."""
    launcher = terminal.starts("--local", "--tasks-per-node", "2", "launch.max_restarts=0", "--name", "oom", *LONG)
    terminal.waits_for_step("oom")
    os.kill(ranks_of(launcher)[1], signal.SIGKILL)
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 1
    assert "rank 1 was killed by SIGKILL" in said
    assert reasons(terminal.run("oom")) == ["failed"]


def test_a_deleted_run_stays_deleted(plain: Terminal) -> None:
    """A run whose folder is deleted while it trains ends, and leaves nothing behind that takes its name: what was left
    was a folder that held nothing but `rescue/`."""
    launcher = plain.starts("--local", "--tasks-per-node", "2", "--name", "deleted", *LONG)
    plain.waits_for_step("deleted")
    run = plain.run("deleted")
    run.path.rename(run.path.with_name("aside"))
    said, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode != 0, said
    assert not run.path.exists(), [str(path) for path in run.path.rglob("*")]


def test_an_error_in_a_rank_is_shown(terminal: Terminal, tmp_path: Path) -> None:
    """A configuration that a rank refuses is reported like any other wrong input: one line, status 2."""
    (tmp_path / "empty_task.py").write_text(
        "import laststep\nclass Empty(laststep.Task):\n    def datasets(self):\n        return [], []\n"
    )
    here = Terminal(tmp_path / "runs", PYTHONPATH=str(tmp_path))
    said = here.types("--local", "--name", "empty", "task=empty_task.Empty", status=2)
    assert "error: task=empty_task.Empty: empty" in said and "Traceback" not in said
    assert said.count("empty_task.Empty: empty") == 1, "the log need not say it too"


def test_the_first_error_is_the_last_line(terminal: Terminal) -> None:
    """One traceback, which begins at the user's own line. The command ends with which rank failed, where and why, and
    with what to type next; above it other ranks say that they have lost that one."""
    two = ("--tasks-per-node", "2", "task=tests.support.tasks.Broken")
    said = terminal.types("--local", "--name", "broken", *two, *TINY, status=1)
    lines = said.splitlines()
    begins = next(number for number, line in enumerate(lines) if line.startswith("Traceback"))
    assert "tests/support/tasks.py" in lines[begins + 1] and said.count("Traceback") == 1, said
    assert "site-packages" not in said and "lost contact" not in said, said
    assert "site-packages" in terminal.types("logs", "broken", "--traceback"), "it shows the frames that are folded"
    error, at, resume, debug = lines[-4:]
    assert re.fullmatch(r"error  rank \d on \S+: ValueError: a bad sample", error), said
    assert said.count("ValueError: a bad sample") == 1, "one that is named three times looks like three"
    assert re.fullmatch(r"at     tasks.py, line \d+, in \w+", at), said
    assert re.fullmatch(r"next   .* resume \S*broken --local", resume), said
    assert re.fullmatch(r"debug  .* resume \S*broken --debug", debug), said


def test_a_debugged_error_is_the_last_line(terminal: Terminal) -> None:
    """Whoever leaves the debugger must not look for what to type next."""
    said = terminal.types("--debug", "--name", "looked", "task=tests.support.tasks.Broken", *TINY, status=1)
    error, _, resume, debug = said.splitlines()[-4:]
    assert "error  rank 0 on" in error and said.count("Traceback") == 1, said
    assert resume.endswith("looked --local") and debug.endswith("looked --debug"), said
    assert "start the run again under the same name" not in said


def test_a_users_error_is_shown_once_by_one_process(tmp_path: Path) -> None:
    """Its log is on the terminal, and Python would print the error there again."""
    (tmp_path / "wrong.py").write_text(
        "import laststep\nclass Wrong(laststep.Task):\n    def datasets(self):\n        raise ValueError('no luck')\n"
    )
    words = ["-m", "laststep", "--name", "wrong", "task=wrong.Wrong", f"launch.root={tmp_path / 'runs'}"]
    process = begin(tmp_path, [forked_python(), *words], {"PYTHONPATH": f"{PROJECT}:{tmp_path}"})
    said = "".join(end(process, 1))
    assert said.count("\nValueError: no luck") == 1 and said.count("Traceback") == 1, said
    assert "attempt ended (failed) after step 0, no step lost: rank 0 on" in said.splitlines()[-2], said
    assert "resume wrong --debug" in said.splitlines()[-1], said


def test_only_one_attempt_at_a_time(terminal: Terminal) -> None:
    """Two attempts on one folder would interleave their metrics and overwrite each other's checkpoints."""
    first = terminal.starts("--local", "--name", "twice", *LONG)
    terminal.waits_for_step("twice")
    said = terminal.types("resume", "twice", "--local", status=2)
    assert "another attempt is at work on this run" in said
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=DEADLINE_S)
    steps = [line["step"] for line in read_lines(terminal.run("twice").metrics) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))


def test_resuming_a_finished_run_says_so(terminal: Terminal) -> None:
    """It trains nothing and changes nothing."""
    terminal.types("--local", "--name", "done", *TINY)
    before = fingerprint(terminal.run("done"))
    assert "done: finished at 4 of 4" in terminal.types("resume", "done", "--local")
    assert fingerprint(terminal.run("done")) == before


def test_task_of_your_own(tmp_path: Path) -> None:
    """README's example, word for word: a Task in 20 lines that learns."""
    readme = (PROJECT / "README.md").read_text()
    code = readme.split("```python\n# my_task.py\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_task.py").write_text(code)
    here = Terminal(tmp_path / "runs", PYTHONPATH=str(tmp_path))
    here.types("--local", "--tasks-per-node", "2", "--name", "mine", "task=my_task.Line", "train.epochs=20")
    last = read_lines(here.run("mine").metrics)[-1]
    assert last["val_loss"] < 0.05, "the line is learned"


def test_mnist_from_a_folder(terminal: Terminal, tmp_path: Path) -> None:
    """A data set that is in data.root already needs no network: compute nodes often have none."""
    shutil.copytree(MNIST_5K, tmp_path / "data")
    said = terminal.types(
        "--local", "--name", "m", "data.name=mnist", f"data.root={tmp_path}/data", "train.max_steps=3"
    )
    assert "step 3/3" in said


def test_image_folder(terminal: Terminal, tmp_path: Path) -> None:
    """A folder of pictures per class, with a torchvision model and augmentation, in two ranks with loader workers. When
    one of them is damaged meanwhile, the run ends with its name, and continues once it is replaced."""
    photos = make_folder(tmp_path / "data", train=16, val=16)
    words = (
        "--local", "--tasks-per-node", "2", "--name", "jpg", "data.name=imagefolder", f"data.root={photos}",
        "data.args.image_size=32", "data.args.augment=true", "data.workers=1", "model.name=resnet18",
        "train.batch_size=8", "train.epochs=2",
    )  # fmt: skip
    victim = photos / "train" / "class1" / "7.jpg"
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    said = terminal.types(*words, status=2)
    assert said.count(f"data.root={photos}: {victim} is not an intact image") == 1
    victim.write_bytes(whole)
    terminal.types("resume", "jpg", "--local")
    assert read_lines(terminal.run("jpg").metrics)[-1]["epoch"] == 2
