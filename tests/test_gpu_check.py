"""`python -m tests.gpu`, without a GPU: the order of its parts, its time, its report. Nobody who runs it runs it twice.

Whoever has a GPU for half an hour must learn the most from it, and have it in a file, however that half hour ends.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu.check import Check
from tests.gpu.parts import PARTS, Part
from tests.support.forked import forked_python
from tests.support.project import DEADLINE_S, PROJECT, wait_until

FIRST = ["full-queue", "full-queue-nccl", "queued-steps", "death-nccl", "death-gloo", "restart"]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def lines(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()]


def test_each_test_is_in_one_part() -> None:
    """One that is in none would never run on a GPU; one that a part names and nobody has would fail it."""
    found = []
    for file in sorted((PROJECT / "tests/gpu").glob("test_*.py")):
        functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        found += [f"{file.stem}::{node.name}" for node in functions if node.name.startswith("test_")]
    assert sorted(test for part in PARTS for test in part.tests) == sorted(found)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_what_matters_most_comes_first() -> None:
    """A machine with GPUs may be there for ten minutes. Benchmarks are the last to be missed."""
    assert [part.name for part in PARTS][: len(FIRST)] == FIRST
    kinds = [bool(part.benchmark) for part in PARTS]
    assert kinds == sorted(kinds)


class Scripted:
    """Stands in for the processes: what each part's tests say, by the part's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **tests: Any) -> None:
        self.tests, self.began = tests, list[str]()
        self.act: Callable[[Check], None] = lambda check: None
        monkeypatch.setattr(Check, "_python", lambda check, *words: self.python(check, *words))
        monkeypatch.setattr(signal, "signal", lambda *_: None)

    def python(self, check: Check, words: list[str], env: dict[str, str], output: Any, limit_s: float) -> int | None:
        if words[1] == "tests.gpu.machine":
            output.write('a warning of torch\'s\n{"torch": "2.11.0", "gpus": [], "compile lacks": null}\n')
            return 0
        name = words[-1].partition("::")[2]
        self.began.append(name)
        self.act(check)
        said = self.tests[name]
        if said is None:
            output.write("Stack of thread 1")
            return None
        with open(env["LASTSTEP_GPU_TESTS"], "w") as file:
            for number, result in enumerate(said):
                file.write(json.dumps({"test": f"{name}-{number}", "result": result, "why": f"why {number}"}) + "\n")
        output.write("a traceback\n1 failed in 3 s")
        return int("failed" in said)


def parts(*names: str) -> list[Part]:
    return [Part(name, "it works", (f"test::{name}",), on_cpus=True) for name in names]


def check(report: Path, *words: str, of: list[Part]) -> int:
    return command.main(["--device", "cpu", "--report", str(report), *words], of)


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What passed, failed and was skipped, with the end of each failure, and on what machine."""
    Scripted(monkeypatch, a=["passed", "skipped"], b=["passed", "failed"], c=["skipped"] * 2, d=None)
    report = tmp_path / "report.jsonl"
    assert check(report, of=[*parts("a", "b", "c", "d"), Part("e", "on GPUs", ("test::e",))]) == 1
    first, *found, last = lines(report)
    assert first["machine"]["torch"] == "2.11.0" and first["machine"]["minutes"] == 20
    assert [(line["part"], line["test"], line["result"]) for line in found if "test" in line][:2] == [
        ("a", "a-0", "passed"),
        ("a", "a-1", "skipped"),
    ]
    of_parts = {line["part"]: line for line in found if "test" not in line}
    results = {name: line["result"] for name, line in of_parts.items()}
    assert results == {"a": "passed", "b": "failed", "c": "skipped", "d": "failed", "e": "skipped"}
    assert of_parts["b"]["why"] == "a traceback\n1 failed in 3 s"
    assert of_parts["b"]["tests"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert (of_parts["c"]["why"], of_parts["e"]["why"]) == ("why 0; why 1", "needs a GPU")
    assert of_parts["d"]["why"] == "Stack of thread 1\nno end within 900 s"
    assert last["end"]["why"] == "finished" and last["end"]["failed"] == 2
    said = capsys.readouterr().out
    assert "failed:     2  b, d\n" in said and f"Please send us {report}.\n" in said


def test_a_report_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may hold the only half hour that anybody had."""
    Scripted(monkeypatch, a=["passed"])
    report = tmp_path / "report.jsonl"
    assert check(report, of=parts("a")) == 0
    before = report.read_text()
    assert check(report, of=parts("a")) == 2
    assert report.read_text() == before and "File exists" in capsys.readouterr().err


def test_the_time_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No further part starts, and no part that did not run looks as if it had passed."""
    script = Scripted(monkeypatch, a=["passed"], b=["passed"], c=["passed"])
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    script.act = lambda check: clock.__setitem__(0, clock[0] + 301)
    report = tmp_path / "report.jsonl"
    assert check(report, "--minutes", "10", of=parts("a", "b", "c")) == 0
    assert script.began == ["a", "b"]
    assert lines(report)[-2] == {"part": "c", "result": "left out", "seconds": 0.0, "why": "the time was used up"}
    said = capsys.readouterr().out
    assert "passed:     2  a, b\nleft out:   1  c\n" in said and "To run it: python -m tests.gpu c\n" in said


def test_nothing_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts were skipped, or there was no time for any: that is no success."""
    Scripted(monkeypatch, a=["skipped"])
    assert check(tmp_path / "skipped", of=parts("a")) == 1
    assert check(tmp_path / "left-out", "--minutes", "1e-9", of=parts("a")) == 1


def test_a_signal_leaves_the_rest_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that it interrupts has neither passed nor failed."""
    script = Scripted(monkeypatch, a=["passed"], b=["failed"], c=["passed"])
    script.act = lambda check: check.stop(signal.SIGTERM) if len(script.began) == 2 else None
    report = tmp_path / "report.jsonl"
    assert check(report, of=parts("a", "b", "c")) == 143
    results = {line["part"]: line["result"] for line in lines(report) if "result" in line and "test" not in line}
    assert results == {"a": "passed", "b": "left out", "c": "left out"}
    assert lines(report)[-1]["end"]["why"] == "stopped by SIGTERM"


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Any]:
    with (tmp_path / "output").open("w+") as file:
        yield file


def test_a_part_that_hangs_is_killed(output: Any, tmp_path: Path) -> None:
    """With all that it has started: it would keep its memory on the GPU."""
    child = "import os, time; open('{}', 'w').write(str(os.getpid())); time.sleep(600)".format(tmp_path / "child")
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert Check("cpu")._python(["-c", parent], {}, output, limit_s=5.0) is None
    pid = int((tmp_path / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the child lives")


def test_within_an_allocation(output: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are mostly reached by salloc or srun. The ranks of the tests must not mistake themselves for its task."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert Check("cpu")._python(["-c", "import os; print(*os.environ)"], {}, output, 60.0) == 0
    output.seek(0)
    names = set(output.read().split())
    assert not names & {"SLURM_JOB_ID", "RANK", "PYTEST_ADDOPTS"} and "NCCL_DEBUG" in names


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ([], "error: torch finds no GPU on this machine"),
        (["-S"], "error: torch, torchvision, submitit, omegaconf, rich, pytest are not installed: "),
    ],
    ids=["no GPU", "no packages"],
)
def test_a_machine_that_cannot(python: list[str], said: str, tmp_path: Path) -> None:
    """One line, status 2, and no report: nothing was checked."""
    report = tmp_path / "report.jsonl"
    words = [forked_python(), *python, "-m", "tests.gpu", "--report", str(report)]
    done = subprocess.run(words, cwd=PROJECT, env=NO_GPU, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert not report.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["full-queu"], "full-queu: no such part; there are full-queue, "), (["--minutes", "0"], "must be more than 0")],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused before anything else takes its time."""
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    assert said in capsys.readouterr().err


def test_a_real_part(tmp_path: Path) -> None:
    """By the command itself, with CPUs as a stand-in: pytest, ranks that are killed and start again, and the report."""
    report = tmp_path / "report.jsonl"
    words = ["-m", "tests.gpu", "--device", "cpu", "--report", str(report), "queued-steps", "restart"]
    done = subprocess.run([sys.executable, *words], cwd=PROJECT, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [(line["part"], line.get("test", "").partition("[")[0], line["result"]) for line in lines(report)[1:-1]]
    restarts = "test_deaths.py::test_ranks_start_again_under_their_supervisors"
    assert results == [
        ("queued-steps", "", "skipped"),
        ("restart", restarts, "passed"),
        ("restart", restarts, "passed"),
        ("restart", "", "passed"),
    ]
    assert lines(report)[-2]["seconds"] > 1


def test_ctrl_c(tmp_path: Path) -> None:
    """The report is complete up to there, and nothing lives on."""
    report = tmp_path / "report.jsonl"
    words = ["-m", "tests.gpu", "--device", "cpu", "--report", str(report), "restart", "shares"]
    with subprocess.Popen([sys.executable, *words], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[1/2] restart"):
                break
        children = wait_until(lambda: children_of(process.pid), "no part has started")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(DEADLINE_S) == 130
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "a part lives on")
    results = {line["part"]: line["result"] for line in lines(report) if "result" in line}
    assert results == {"restart": "left out", "shares": "left out"}
    assert lines(report)[-1]["end"]["why"] == "stopped by SIGINT"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
