"""Alerts of real runs: what arrives at a real server, and what a server that hangs costs the run."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from laststep.alert.looker import LEAVE_S
from laststep.config import secret
from laststep.records.metrics import read_lines
from tests.alert.server import webhook
from tests.support.commands import SLOW_STEPS, Terminal, ranks_of
from tests.support.project import DEADLINE_S, wait_until

pytest.importorskip("apprise", reason="needs apprise: pip install apprise")
BESIDE = ("telemetry.record=always", "train.epochs=2", "train.log_every=5")


def test_a_killed_rank_a_stop_and_a_resume(tmp_path: Path) -> None:
    """The whole of a bad day: what continues by itself is no alert; the death of all ranks, and of the program beside
    them, is said by the command that started them; and the URL is nowhere but in the one file that others cannot read.
    The telemetry of all attempts is one file."""
    terminal = Terminal(tmp_path / "runs", sys.executable)
    with webhook() as hook:
        launcher = terminal.starts(
            "--local", "--tasks-per-node", "2", "--name", "told", *SLOW_STEPS, *BESIDE, f"alert.to=['{hook.url}']"
        )
        run = terminal.run("told")
        terminal.waits_for_step("told")
        os.kill(ranks_of(launcher)[1], signal.SIGKILL)
        wait_until(lambda: len(read_lines(run.attempts)) == 1, "no restart")
        wait_until(lambda: read_lines(run.attempt_now), "no second attempt")
        step = read_lines(run.metrics)[-1]["step"]
        wait_until(lambda: read_lines(run.metrics)[-1]["step"] > step, "no further step")
        launcher.send_signal(signal.SIGTERM)
        said, _ = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 143, said
        assert not hook.got, "a restart is no alert, and the user stopped it"
        one_rank = ("launch.tasks_per_node=1", "launch.max_restarts=0")
        launcher = terminal.starts("resume", "told", "--local", *one_rank)
        wait_until(lambda: read_lines(run.metrics)[-1]["step"] > step + 20, "it did not train on")
        for rank in ranks_of(launcher):
            os.kill(rank, signal.SIGKILL)
        lost, _ = launcher.communicate(timeout=DEADLINE_S)
        wait_until(lambda: hook.titles == ["told failed"], lost)
        assert re.search(r"lost at step \d+ of 200, and does not continue by itself", hook.got[0]["message"])
        resumed = terminal.types("resume", "told", "--local")
        wait_until(lambda: hook.titles == ["told failed", "told finished"], resumed)
        assert "finished after 200 steps" in hook.got[1]["message"]
        assert [r["reason"] for r in read_lines(run.attempts)] == ["failed", "cancelled", "lost", "finished"]
    assert secret.read(run.secrets, "alert.to") == [hook.url]
    assert stat.S_IMODE(run.secrets.stat().st_mode) == 0o600
    for path in run.path.rglob("*"):
        if path.is_file() and path != run.secrets:
            assert b"hush" not in path.read_bytes(), path
    assert "hush" not in said + lost + resumed + terminal.types("status", "told", "--json")
    lines = [line for path in run.telemetry.glob("*") for line in read_lines(path)]
    assert lines, "an attempt of more than ten seconds"
    assert all(line["cpu_cores"] >= 0 and line["memory_gb"] > 0 for line in lines)
    assert {"training", "waiting for data"} & {what for line in lines for what in line["doing"]}


def test_a_server_that_hangs_costs_the_run_nothing(tmp_path: Path) -> None:
    """The run takes its time, ends as it ends, and its command returns within what is said."""
    terminal = Terminal(tmp_path / "runs")
    with webhook() as hook:
        hook.hangs = True
        targets = f"alert.to=['{hook.url}', sleep 98, sleep 99]"
        terminal.types("--local", "--name", "deaf", *SLOW_STEPS, "train.epochs=1", "train.max_steps=20", targets)
        took = time.time()
        run = terminal.run("deaf")
        (record,) = read_lines(run.attempts)
        assert record["reason"] == "finished"
        assert took - record["end"] < LEAVE_S + 10
        assert hook.asked == 1, "claimed by one, and not asked again at once"
    assert not list(run.alerts.glob("*.sent"))
