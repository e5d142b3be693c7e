"""Commands that do not know Laststep: `launch.py --nodes 2 other.py --its words`, `launch.py -- COMMAND words`."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from laststep import script
from laststep.attempt.predecessor import finish_of
from laststep.cli.main import main
from laststep.config.config import Config
from laststep.ranks.process import children_of
from laststep.records import kept_files
from laststep.records.metrics import read_lines
from laststep.rundir import RunDir, write_whole
from laststep.trainer import Trainer
from tests.cli.test_script import LAUNCH
from tests.support.commands import begin, end, refusal, types
from tests.support.forked import forked_python
from tests.support.project import PROJECT, wait_until
from tests.support.ranks import reasons, train

OTHER = PROJECT / "tests" / "cli" / "user_scripts" / "other.py"
TWO_RANKS = (*LAUNCH, "--local", "--tasks-per-node", "2", "--name", "run")
EXACT = "add `import laststep` and `run = laststep.run()` for exact resume"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with such a script in it."""
    shutil.copy(OTHER, tmp_path / "other.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def log_of(run: RunDir, rank: int) -> str:
    """What a rank of the newest start has printed."""
    return max(run.logs.glob(f"*_{rank}_log.out")).read_text()


def assert_nothing_lives(run: RunDir) -> None:
    """No process that the commands have started outlives their attempts."""
    for helper in run.files.glob("helper_*"):
        assert not os.path.exists(f"/proc/{helper.read_text()}"), f"{helper.name} lives"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere", "nowhere: no such program; a program of this folder is ./nowhere"),
        ("./nowhere", "./nowhere: no such program in {folder}"),
        ("./other.py.txt", "./other.py.txt: cannot be executed: chmod +x, or name what runs it"),
        ("python knows.py", "knows.py: imports laststep: leave `python` out, so that it resumes exactly"),
    ],
)
def test_refused(words: str, said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before anything is submitted, in one line."""
    (folder / "other.py.txt").touch()
    (folder / "knows.py").write_text("import laststep\n")
    assert refusal(["--local", "--", *words.split()], capfd, folder) == said.format(folder=folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--local train.epochs=3 other.py", "train.epochs: task=command does not read it, so it would change nothing"),
        ("--local --debug other.py", "argument --debug: not allowed with argument --local"),
        ("--debug other.py", "--debug: other.py resumes by itself, and Laststep sees neither its steps nor"),
        ("--smoke other.py", "--smoke: other.py resumes by itself"),
        ("prove other.py", "prove: other.py resumes by itself"),
        ("task=command", "task=command: name the script and its words"),
    ],
)
def test_what_it_cannot(words: str, said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What needs steps that Laststep knows is refused before it costs anything."""
    assert refusal(words.split(), capfd, folder).startswith(said)


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        (["other.py", "--x"], "other"),
        (["bash", "train.sh"], "train"),
        (["./build/solve", "--x"], "solve"),
        (["-m", "package.train"], "train"),
    ],
)
def test_what_its_run_is_called(words: list[str], stem: str) -> None:
    """Not `python` or `bash`: all runs would be called that."""
    assert script.stem_of(words) == stem


def test_any_words_can_be_a_command(folder: Path) -> None:
    """A line for a shell may be longer than a file's name, and begin like a home directory."""
    line = ["bash", "-c", "echo " + 5000 * "x", "~nobody-of-that-name", "other.py", ""]
    assert script.files_of(line, folder) == [folder / "other.py"]
    assert script.command_line(line) == line


def test_what_is_configured(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first line of a start says in words what such a run is, and the record of it says so too."""
    assert main(["--dry-run", "--local", "other.py", "--lr", "1"]) == 0
    said = capfd.readouterr().out
    assert f"command other.py --lr 1 (resumes by itself; {EXACT})" in said
    assert "\ntask: command\n" in said
    (folder / "own.yaml").write_text("script: [bash, -c, 'echo $HOME']\n")
    assert main(["--dry-run", "--local", "--config", "own.yaml"]) == 0
    assert "command bash -c 'echo $HOME' (resumes by itself)" in capfd.readouterr().out


def test_progress_is_a_changed_file(folder: Path) -> None:
    """An attempt that leaves the files as they were has made no progress: max_failures counts it."""
    run = RunDir(folder / "run")
    assert kept_files.kept(run) is None, "of any other run"
    kept_files.mark(run, ["x"], attempt=0)
    (run.files / "inner").mkdir()
    assert kept_files.kept(run) == 0
    (run.files / "inner" / "state").write_text("1")
    assert kept_files.kept(run) == 1
    kept_files.mark(run, ["x"], attempt=1)
    assert kept_files.kept(run) == 1
    assert (kept_files.words_of(run, attempt=0), kept_files.words_of(run, attempt=1)) == (None, ["x"])
    (run.files / "inner" / "state").unlink()
    assert kept_files.kept(run) == 2
    shutil.move(run.path, folder / "moved")
    assert kept_files.kept(RunDir(folder / "moved")) == 2


@pytest.mark.slow
def test_a_rank_is_killed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks start again, and find what they have saved; the others were asked to end, and could save. No
    process is left."""
    said = types(folder, *TWO_RANKS, "other.py", "--steps", "80", "--kill-at", "13")
    run = RunDir(folder / "runs" / "run")
    assert [(r["reason"], r["requeue"], r["blamed"] != []) for r in read_lines(run.attempts)] == [
        ("failed", True, True),
        ("finished", False, False),
    ]
    assert "the command was killed by SIGKILL" in read_lines(run.attempts)[0]["error"]
    assert "rank 0 at 0:2:2 from step 0, resumes 0" in said
    assert "rank 0 stops by SIGTERM at step" in said and "restarting the ranks after a fault" in said
    assert "rank 1 at 1:2:2 from step 10, resumes 1" in log_of(run, 1)
    assert said.endswith("kept   runs/run/files\n")
    assert_nothing_lives(run)
    assert main(["status", "run"]) == 0
    shown = capfd.readouterr().out
    assert "resumes by itself: steps lost are its own" in shown and "goodput" not in shown
    for verb in (["verify", "run"], ["export", "run", "x.pt"], ["evaluate", "run"], ["--from", "run"]):
        assert "other.py resumes by itself" in refusal(verb, capfd, folder)
    assert "run: finished\n" in types(folder, *LAUNCH, "resume", "run", "--local")
    said = types(folder, *LAUNCH, "resume", "run", "--local", "--", "--steps", "85")
    assert "rank 0 at 0:2:2 from step 80, resumes 1" in said and reasons(run) == ["failed", "finished", "finished"]


def with_words(folder: Path, *words: str, ranks: int = 1) -> Config:
    """The run whose command is the script with these words."""
    command = script.as_override([str(folder / "other.py"), *words])
    size = f"launch.tasks_per_node={ranks}"
    return Config.load(None, ["task=command", command, size, f"launch.root={folder}", "launch.name=run"])


def look_while_rank_0_begins(folder: Path) -> None:
    """Rank 0 is about to record that the attempt begins: rank 1 looks at the run just then."""
    rank, predecessor = int(os.environ["SUBMITIT_LOCAL_GLOBALID"]), importlib.import_module(finish_of.__module__)
    command: Any = importlib.import_module("laststep.attempt.command")
    begins, looked, begin = folder / "begins", folder / "looked", command.begin_attempt

    def begin_later(*words: Any) -> Any:
        begins.touch()
        wait_until(looked.exists, "rank 1 did not look at the run")
        assert looked.read_text() == "None", "rank 1 takes the run for finished"
        return begin(*words)

    def look(*words: Any) -> Any:
        if rank:
            wait_until(begins.exists, "rank 0 did not begin")
        found = finish_of(*words)
        if rank:
            write_whole(looked, str(found))
        return found

    command.begin_attempt, predecessor.finish_of = begin_later, look  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_rank_that_comes_late(folder: Path) -> None:
    """The run has finished, and continues with other words: a rank that looks at it while rank 0 begins takes part."""
    train(with_words(folder, "--steps", "5", ranks=2))
    again = with_words(folder, "--steps", "10", ranks=2)
    run = train(again, before=partial(look_while_rank_0_begins, folder))
    assert reasons(run) == ["finished", "finished"]
    assert "rank 1 at 1:2:2 from step 5, resumes 1" in log_of(run, 1)
    assert_nothing_lives(run)


def look_at_every_change(config: Config) -> None:
    """Look at the run whenever this rank has replaced or renamed a file, until the end is recorded."""
    run = Trainer(config).run

    def looks(change: Any) -> Any:
        def change_and_look(path: Path, target: Path) -> Path:
            changed: Path = change(path, target)
            done = len(read_lines(run.attempts)) > 1
            assert done or finish_of(run, config) is None, f"{target.name} makes the run look finished"
            return changed

        return change_and_look

    Path.replace, Path.rename = looks(Path.replace), looks(Path.rename)  # type: ignore[method-assign]


@pytest.mark.slow
def test_finished_only_once_it_is(folder: Path) -> None:
    """Wherever an attempt with other words is killed, before its end is recorded the run does not look finished."""
    train(with_words(folder, "--steps", "5"))
    again = with_words(folder, "--steps", "10")
    run = train(again, before=partial(look_at_every_change, again))
    assert reasons(run) == ["finished", "finished"]
    assert finish_of(run, again) is not None and finish_of(run, with_words(folder, "--steps", "5")) is None


@pytest.mark.slow
def test_laststeps_own_process_is_killed(folder: Path) -> None:
    """The command dies with it, and what that has started; the other ranks notice, and all start again."""
    command = begin(folder, [*TWO_RANKS, "other.py", "--steps", "80"])
    run = RunDir(folder / "runs" / "run")
    wait_until(lambda: len(list(run.files.glob("state_?"))) == 2, "the command did not start")
    (rank_1,) = children_of(max(children_of(command.pid)))
    os.kill(rank_1, signal.SIGKILL)
    said = "".join(end(command, 0))
    assert "rank 1 on " in said and "ended without a word: it was killed" in said
    assert reasons(run) == ["failed", "finished"]
    assert_nothing_lives(run)


@pytest.mark.slow
def test_an_error_of_its_own(folder: Path) -> None:
    """Under --local an error of the run itself is not retried; the other rank's command ends too."""
    said = types(folder, *TWO_RANKS, "other.py", "--steps", "4000", "--fail-at", "13", status=1)
    run = RunDir(folder / "runs" / "run")
    (record,) = read_lines(run.attempts)
    assert record["reason"] == "failed" and "the command ended with exit status 3" in record["error"]
    assert "the command of rank 1 ended with exit status 3: ending that of this rank" in said
    assert_nothing_lives(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("other.py", "--steps", "4000"),
        ("-m", "package.other", "--steps", "4000"),
        ("--", "bash", "other.sh"),
        ("--", sys.executable, "other.py", "--steps", "4000"),
    ],
)
def test_a_stop(words: tuple[str, ...], folder: Path) -> None:
    """Ctrl-C reaches the command, also behind a shell; its end is awaited, nothing outlives it, and `resume` starts it
    again with the words that it had. Laststep's own processes beside it import no torch: seconds, and memory."""
    (folder / "other.sh").write_text(f"{sys.executable} other.py --steps 4000\necho not reached\n")
    (folder / "package").mkdir()
    shutil.copy(OTHER, folder / "package" / "other.py")
    command = begin(folder, [*TWO_RANKS, *words])
    run = RunDir(folder / "runs" / "run")
    wait_until(lambda: len(list(run.files.glob("state_?"))) == 2, "the command did not start")
    ours = [*(supervisors := children_of(command.pid)), *(rank for pid in supervisors for rank in children_of(pid))]
    assert len(ours) == 4 and all("libtorch" not in Path(f"/proc/{pid}/maps").read_text() for pid in ours)
    command.send_signal(signal.SIGINT)
    said = "".join(end(command, 128 + signal.SIGINT))
    assert "rank 0 stops by SIGTERM at step" in said and "not reached" not in said
    assert "stopped; it resumes by itself\nnext   " in said
    assert reasons(run) == ["cancelled"]
    assert_nothing_lives(run)
    expected = list(words[1:]) if words[0] == "--" else list(words)
    config = Config.parse(run.config.read_text())
    assert (config.task, config.script) == ("command", expected)
    command = begin(folder, [*LAUNCH, "resume", "run", "--local"])
    wait_until(lambda: "resumes 1" in log_of(run, 1), "it did not resume")
    types(folder, *LAUNCH, "cancel", "run")
    end(command, 128 + signal.SIGTERM)
    assert_nothing_lives(run)


@pytest.mark.slow
def test_the_warning_of_a_time_limit(folder: Path) -> None:
    """SIGUSR2 reaches a command that catches it; any other gets SIGTERM, or it would die without saving."""
    (folder / "catches.sh").write_text("trap 'echo caught; exit 5' USR2\nwhile :; do sleep 0.1; done\n")
    command = begin(folder, [*LAUNCH, "--local", "--name", "run", "--", "bash", "catches.sh"])
    run = RunDir(folder / "runs" / "run")
    wait_until(lambda: run.progress.exists(), "the command did not start")
    command.send_signal(signal.SIGUSR2)
    said = "".join(end(command, 128 + signal.SIGUSR2))
    assert "caught\n" in said and "the command ended with exit status 5" in said
    assert reasons(run) == ["preempted"]


@pytest.mark.slow
def test_a_module_of_its_own_knows_us(folder: Path) -> None:
    """A script that reaches laststep.run() only through another module is told what to write."""
    (folder / "inner.py").write_text("import laststep\n\nrun = laststep.run()\n")
    (folder / "outer.py").write_text("import inner\n")
    said = types(folder, *LAUNCH, "--local", "--name", "run", "outer.py", status=1)
    assert "write `import laststep` into the script" in said


FUNCTION = """
import argparse, os, signal, subprocess, time
from torch import nn, optim

def main(run):
    argparse.ArgumentParser().parse_args()
    open("helper", "w").write(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    if os.environ.get("ALONE"):
        return
    model = nn.Linear(1, 1)
    run.restore(model=model, optimizer=optim.SGD(model.parameters()))
    for step in run.steps(count=9):
        time.sleep(0.1)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_what_a_function_starts(folder: Path) -> None:
    """A function that parses arguments gets none of Laststep's, and what it has started ends with its attempt, however
    that ends. One whose script did all the work is told how to run that."""
    (folder / "own.py").write_text(FUNCTION)
    words, python = (*LAUNCH, "--local", "device=cpu", "task=own.main", "--name"), forked_python()
    types(folder, *words, "run", status=128 + signal.SIGTERM, python=python)
    assert reasons(RunDir(folder / "runs" / "run")) == ["cancelled"]
    assert not os.path.exists(f"/proc/{(folder / 'helper').read_text()}")
    said = types(folder, *words, "alone", env={"ALONE": "1"}, status=2, python=python)
    assert "what trains in a process of its own is a command: `" in said
    assert not os.path.exists(f"/proc/{(folder / 'helper').read_text()}")


@pytest.mark.slow
def test_a_sweep_of_its_words(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Marked words alone vary, each run is called by them, and `status` shows them in columns of their own."""
    sweep = ("sweep", "--name", "scan", "--local")
    assert main([*sweep, "--dry-run", "other.py", "--steps", "@3,4", "--lr=@1e-3,0.10"]) == 0
    assert "\nscan-steps_3-lr_1e-3  steps=3 lr=1e-3\n" in capfd.readouterr().out
    words = (*sweep, "other.py", "--steps", "4", "--lr=@1e-3,0.10")
    said = types(folder, *LAUNCH, *words)
    assert "sweep  scan: 2 finished" in said and "done, lr 0.1, " in said
    run = RunDir(folder / "runs" / "scan-lr_0.10")
    assert Config.parse(run.config.read_text()).script == ["other.py", "--steps", "4", "--lr=0.10"]
    assert (run.files / "state_0").exists() is False, "saved at every fifth step only"
    assert main(["status", "--sweep", "scan"]) == 0
    shown = capfd.readouterr().out
    assert shown.splitlines()[0].split()[:3] == ["run", "state", "lr"] and " 0.10 " in shown
    assert main([*words]) == 0
    assert "0 to do" in "".join(capfd.readouterr()), "all have finished"
