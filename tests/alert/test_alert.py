"""Alerts: each event once, by any process that is left; no secret where others read, and no cost to the run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laststep.alert import events, looker, post
from laststep.alert.events import Event, Loss
from laststep.alert.looker import Watch, look_once
from laststep.cli.main import main
from laststep.config import secret
from laststep.config.config import Config
from laststep.config.schema import Launch
from laststep.rundir import RunDir
from laststep.submission.submission import ready
from tests.alert.server import Webhook, webhook
from tests.support.commands import refusal
from tests.support.project import wait_until
from tests.telemetry.nvml import Nvml
from tests.telemetry.test_telemetry import sampled

pytest.importorskip("apprise", reason="needs apprise: pip install apprise")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # apprise's own
ALL = ["failed", "finished", "requeued", "hung", "idle", "diverged"]


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "runs" / "seen")
    found.path.mkdir(parents=True)
    return found


def record(number: int, reason: str | None, steps: tuple[int, int], **more: Any) -> Any:
    """A record of attempts.jsonl that has just ended; times are counted from when `make` writes it."""
    found = {"attempt": number, "job_id": "7", "restart": number, "step_id": 0, "step_restarts": 0, "chain": None}
    found |= {"hosts": ["n1", "n2"], "world_size": 4, "start": -100.0, "end": 0.0 if reason else None}
    found |= {"start_step": steps[0], "end_step": steps[1], "reason": reason, "lost_steps": 0, "lost_s": 0.0}
    found |= {"step_s": 1.0, "save_s": None, "requeue": False, "error": None, "blamed": [], "job_start": None}
    return found | more


def since(now: float, each: Any) -> Any:
    """A record whose times are counted from `now`."""
    return {**each, "start": now + each["start"], "end": None if each["end"] is None else now + each["end"]}


def make(run: RunDir, records: list[Any], targets: list[str], when: list[str] = ALL) -> Watch:
    """A run with these attempts, and somebody who looks at it."""
    config = secret.set_apart(
        Config.load(None, [f"alert.to={json.dumps(targets)}", f"alert.when=[{','.join(when)}]", "launch.name=seen"])
    )
    config.save(run.config)
    secret.write(run.secrets)
    run.attempts.write_text("".join(json.dumps(since(time.time(), each)) + "\n" for each in records))
    return Watch(run)


PREEMPTED = record(0, "preempted", (0, 40), requeue=True)
KILLED = record(1, "failed", (40, 60), requeue=True, lost_steps=2, lost_s=3.0, error="rank 1 on n2: gone (killed)")
HUNG = record(2, "hung", (58, 70), requeue=True)
FAILED = record(3, "failed", (70, 80), error="rank 1 on n2 failed:\nTraceback\n  x\nKeyError: 'x'")
FINISHED = record(4, "finished", (80, 100))


def test_each_event_once(run: RunDir, hook: Webhook) -> None:
    """A preemption, a rank that was killed and started again, a hang, the end of the run, and its resume: nobody reads
    alerts that come twice, and one that does not come may cost a weekend."""
    records: list[Any] = []
    for each in (PREEMPTED, KILLED, HUNG, FAILED, FINISHED):
        records.append(each)
        for _ in range(2):  # any process may look: a new program beside each attempt, the batch shell, a command
            make(run, records, [hook.url]).look()
    assert hook.titles == ["seen is requeued", "seen hung", "seen failed", "seen finished"]
    requeued, hung, failed, finished = (message["message"] for message in hook.got)
    assert "preempted at step 40; it continues from the queue" in requeued and "Next: " in requeued
    assert "hung at step 70" in hung and "It continues by itself." in hung
    assert "Why: rank 1 on n2 failed: KeyError: 'x'" in failed and f"resume {run.path}" in failed
    assert "finished after 100 steps" in finished and "2 lost steps and 0.56 rank hours" in finished
    for message in hook.got:
        assert "hush" not in json.dumps(message)


def test_only_what_was_asked_for(run: RunDir, hook: Webhook) -> None:
    """And a hang that ends the run is said as its failure to those who asked for that alone."""
    records = [PREEMPTED, record(1, "hung", (40, 60))]
    make(run, records, [hook.url], ["failed"]).look()
    assert hook.titles == ["seen failed"]
    make(run, [record(0, "cancelled", (0, 9))], [hook.url]).look()
    assert len(hook.titles) == 1, "the user cancelled it, and knows"


def test_what_is_old_is_not_said(run: RunDir, hook: Webhook) -> None:
    """Alerts that are turned on for a run of weeks must not begin with all of its history."""
    old = {**FAILED, "start": -9000.0, "end": -8000.0}
    make(run, [old, FINISHED], [hook.url]).look()
    assert hook.titles == ["seen finished"]


def test_many_look_at_once(run: RunDir, hook: Webhook) -> None:
    """The programs of a stop look within the same second, on several nodes."""
    watches = [make(run, [FINISHED], [hook.url]) for _ in range(8)]
    threads = [threading.Thread(target=watch.look) for watch in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hook.titles == ["seen finished"]


def test_who_dies_before_sending(run: RunDir, hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may die with the claim: the next who looks sends it, but not while the first may still be sending."""
    watch = make(run, [FINISHED], [hook.url])
    run.alerts.mkdir()
    claim = run.alerts / "0004-end.0.1"
    claim.touch()
    watch.look()
    assert not hook.got
    os.utime(claim, (time.time() - post.CLAIM_S - 1,) * 2)
    watch.look()
    watch.look()
    assert hook.titles == ["seen finished"]


def test_a_server_that_refuses(run: RunDir, hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, by later looks, a few times in all: nobody needs a thousand errors in a log."""
    hook.refuses = True
    watch = make(run, [FINISHED], [hook.url])
    monkeypatch.setattr(post, "CLAIM_S", 0.0)
    for _ in range(3):
        watch.look()
    assert hook.asked >= 3 and not hook.got
    hook.refuses = False
    watch.look()
    watch.look()
    assert hook.titles == ["seen finished"]


def test_it_gives_up(run: RunDir, hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    hook.refuses = True
    watch = make(run, [FINISHED], [hook.url])
    monkeypatch.setattr(post, "CLAIM_S", 0.0)
    for _ in range(2 * post.TRIES):
        watch.look()
    assert len(list(run.alerts.glob("*.[0-9]"))) == post.TRIES


def test_a_server_that_hangs(run: RunDir, hook: Webhook) -> None:
    """Nobody waits for it longer than said, and the other targets get theirs."""
    hook.hangs = True
    began = time.monotonic()
    said = post.send(Event("finished", "k", "t", "x"), hook.url, run, deadline_s=0.3)
    assert said == "no answer within 0 s" and time.monotonic() - began < 5


def test_a_command(run: RunDir, tmp_path: Path) -> None:
    """Any program can be a target; one that hangs is killed with all that it has started."""
    got = tmp_path / "got"
    make(run, [FINISHED], [f"cat > {got}; echo $LASTSTEP_ALERT $LASTSTEP_RUN >> {got}"]).look()
    text = got.read_text()
    assert text.startswith("seen finished\n\nseen finished after 100 steps.") and f"finished {run.path}\n" in text
    event = Event("finished", "k", "t", "x")
    assert "ended with 3" in post.send(event, "exit 3", run)
    assert "not ended within" in post.send(event, "sleep 60 & sleep 60", run, deadline_s=0.2)


def test_a_look_in_a_process_of_its_own(run: RunDir, hook: Webhook) -> None:
    """As the batch shell and watching commands do it: they load nothing, and end in time."""
    make(run, [FINISHED], [hook.url])
    look_once(run.path)
    wait_until(lambda: hook.titles == ["seen finished"], "not sent")
    look_once(run.path / "gone")


def test_nobody_waits_for_a_slow_command(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that sends outlives the command that has started it, and does not hold its output."""
    monkeypatch.setattr(looker, "LEAVE_S", 0.5)
    monkeypatch.setattr(looker, "_ends_with_us", lambda: False)
    sent = tmp_path / "sent"
    make(run, [FINISHED], [f"sleep 3; cat > {sent}"])
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    look_once(run.path)
    assert not sent.exists()
    sys.stdout.close()
    with os.fdopen(read) as output:
        assert "still being sent" in output.read(), "and ends"
    assert not sent.exists()
    wait_until(lambda: "alert finished sent" in run.beside_log("alert").read_text(), "not sent")
    assert "seen finished" in sent.read_text() and list(run.alerts.glob("*.sent"))


def test_a_command_outlives_no_sender_for_long(run: RunDir, tmp_path: Path) -> None:
    """A sender that is killed leaves a command that hangs, which ends by itself."""
    code = (
        "from pathlib import Path; from laststep.alert import post; from laststep.alert.events import Event; "
        "from laststep.rundir import RunDir; "
        f"post.send(Event('finished', 'k', 't', 'x'), 'echo $$ > {tmp_path}/pid; sleep 99; :', RunDir('x'), 1.5)"
    )
    sender = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "no command")
    sender.kill()
    sender.wait()
    place = Path("/proc") / (tmp_path / "pid").read_text().strip()
    wait_until(lambda: not (place / "exe").exists(), "the command hangs on")


def test_a_rank_of_a_command_leaves_the_end_to_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the end of `--local` would wait for a server that hangs."""
    make(run, [FINISHED], ["true"])
    config = Config.load(run.config)
    assert [one.where for one in looker.programs(config, run)] == ["run", "end"]
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    assert [one.where for one in looker.programs(config, run)] == ["run"]


def test_a_broken_run_folder_ends_nothing(run: RunDir) -> None:
    """Only the alerts are lost."""
    run.config.write_text("{")
    look_once(run.path)


def losses(*parts: tuple[int, float]) -> list[float]:
    """A noisy loss: this many steps around each of these values."""
    noise = random.Random(1)
    return [value * noise.uniform(0.8, 1.25) for count, value in parts for _ in range(count)]


def said(values: list[Any]) -> list[int]:
    loss = Loss()
    found = (loss.add(step, value) for step, value in enumerate(values, 1))
    return [one[0] for one in found if one is not None]


def test_a_loss_that_diverges() -> None:
    """It is said once, with its first step; a spike that comes back, and noise, wake nobody up."""
    assert said(losses((400, 1.0))) == []
    assert said([3 / (1 + step / 50) + value for step, value in enumerate(losses((600, 0.3)))]) == []
    assert said(losses((300, 1.0), (events.STEPS - 1, 9.0), (200, 1.0))) == []
    assert said(losses((300, 1.0), (300, 9.0))) == [301]
    assert said([*losses((300, 1.0)), *[None] * 60]) == [301], "not finite, with train.nonfinite=skip"
    assert said(losses((300, 1.0), (200, 9.0), (200, 1.0), (200, 90.0))) == [301, 701]
    assert said([2.0] * 100 + [2.05] * 100) == [], "a constant loss has no spread"


def test_diverged_is_said_once_over_attempts(run: RunDir, hook: Webhook) -> None:
    """Steps that are lost and done again have the same loss; who begins to look in the middle sees another range."""
    watch = make(run, [record(0, None, (0, 0))], [hook.url])

    def write(count: int) -> None:
        values = losses((300, 1.0), (300, 9.0))[:count]
        lines = [{"step": step, "time": time.time(), "loss": value} for step, value in enumerate(values, 1)]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(250)
    watch.look()
    assert not hook.got
    for count in (310, 330, 305, 340, 420):
        write(count)
        watch.look()
        Watch(run).look()
    assert hook.titles == ["seen diverges"]
    assert "since step 301" in hook.got[0]["message"]


def test_idle_gpus(run: RunDir, hook: Webhook) -> None:
    """Once per attempt, with the likely cause."""
    nvml = Nvml()
    nvml.use = [0.0, 0.0]
    sampled(run, nvml, 320, began=time.time() - 320)
    watch = make(run, [], [hook.url])
    run.attempt_now.write_text(json.dumps(since(time.time(), record(0, None, (0, 0)))))
    watch.look()
    Watch(run).look()
    assert hook.titles == ["seen leaves its GPUs idle"]
    assert "All GPUs of n1 have been idle for 5m 20s" in hook.got[0]["message"]


# Secrets


def test_a_dry_run_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is made to be looked at, and pasted into an issue."""
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--local", "--config", "mnist", "alert.to=[json://someone:hush@localhost/x]"]) == 0
    shown = capfd.readouterr().out
    assert "json://***" in shown and "hush" not in shown


def test_a_secret_is_in_no_job_file() -> None:
    """submitit's pickle of the Trainer lies in logs/ for all to read."""
    from laststep.config.machine import Machine, Way

    config: Any = Config.load(None, ["alert.to=[cat hush]", "data.name=fake", "launch.name=x"])
    made: Any = ready(config, Machine(Way.DRY_RUN))
    assert made.alert.to == ["***"] and "hush" not in made.to_yaml()


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("alert.to=[nope://hush]", "alert.to=nope://***: no URL that apprise can send to"),
        ("alert.to=[no-such-program hush]", "no-such-program is neither a URL nor a command"),
        ("alert.to=['cat \"hush']", "a command cannot be read: No closing quotation"),
        ("alert.to=json://hush", "alert.to=***: must be of type list[str]; write alert.to=[***]"),
        ("alert.to=[{json: hush}]", "alert.to=***: must be of type list[str]"),
        ("alert.to=[json://hush", "alert.to=***: cannot be read as key=value"),
        ("alert.when=failed", "alert.when=failed: must be of type list[str]; write alert.when=[failed]"),
        ("alert.when=[faild]", "alert.when=faild: did you mean failed?"),
    ],
)
def test_refused_at_submission(
    word: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line now, instead of silence at the moment that matters."""
    monkeypatch.chdir(tmp_path)
    said = refusal(["--local", "--config", "mnist", word], capfd, tmp_path)
    assert words in said and "hush" not in said


def test_without_apprise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Where a URL needs it; a command does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "apprise", None)
    said = refusal(["--local", "--config", "mnist", "alert.to=[json://hush]"], capfd, tmp_path)
    assert "alert.to=json://***: needs apprise" in said and "pip install apprise" in said
    assert main(["--dry-run", "--local", "--config", "mnist", "alert.to=[cat]"]) == 0


def test_records_are_of_this_version() -> None:
    """`_kinds` asks the retry policy, which reads fields of the record."""
    kinds = events._kinds([PREEMPTED, KILLED], Launch())
    assert kinds == [], "its ranks are started again in the allocation"
    assert events._kinds([PREEMPTED, KILLED], Launch(max_restarts=0)) == ["requeued"]
