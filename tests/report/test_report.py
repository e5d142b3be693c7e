"""The report: a page that shows every point, and every end of an attempt, correctly."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from laststep.cli.main import main
from laststep.config.config import Config
from laststep.report.curves import MAX_POINTS, Curve
from laststep.report.page import ShownAttempt, Span, spans_of, table
from laststep.rundir import RunDir
from tests.support.needs import require
from tests.support.project import DEADLINE_S

BEGAN = 1_795_000_000.0
REASONS = ["preempted", "timeout", "cancelled", "failed", "hung", "lost", "finished"]


def attempt(
    number: int, start: float, end: float | None, steps: tuple[int, int], reason: str | None, **more: Any
) -> Any:
    """A record of attempts.jsonl; times are in seconds since the start of the run."""
    record = {"attempt": number, "job_id": "7", "restart": number, "step_id": 0, "step_restarts": 0}
    record |= {"hosts": ["n1", "n2"], "world_size": 4}
    record |= {"start": BEGAN + start, "end": end and BEGAN + end, "start_step": steps[0], "end_step": steps[1]}
    record |= {"reason": reason, "lost_steps": 0, "lost_s": 0.0, "step_s": 1.0, "requeue": False, "error": None}
    return record | more


def step(number: int, loss: float | None, **more: Any) -> dict[str, Any]:
    """A step's line of metrics.jsonl; each step takes a second."""
    line = {"step": number, "epoch": 1 + number // 100, "loss": loss, "lr": 0.1, "samples_per_s": 64.0}
    return line | {"time": BEGAN + number} | more


def lines(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all runs, on a machine without Slurm; the current folder is another one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", "/nonexistent")
    return tmp_path / "runs"


def make(root: Path, name: str, metrics: Iterable[Any] = (), attempts: Iterable[Any] = (), **config: Any) -> RunDir:
    """A run folder with these files."""
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    Config.load(None, [f"launch.name={name}", *(f"{k.replace('__', '.')}={v}" for k, v in config.items())]).save(
        run.config
    )
    run.metrics.write_text(lines(metrics))
    run.attempts.write_text(lines(attempts))
    return run


@dataclass
class Row:
    """A point of a curve as page.js gets it."""

    first: int
    last: int
    count: int
    bad: int
    mean: float
    low: float
    high: float


class Page(HTMLParser):
    """A page as a browser parses it: its text, every attribute of every element, its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.text = ""
        self.scripts: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(self.source)
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        else:
            self.text += data

    @property
    def curves(self) -> Any:
        """The data that page.js draws."""
        return json.loads(self.scripts[0])

    def rows(self, figure: int, run: int = 0) -> list[Row]:
        """The points of a run's curve in a figure."""
        return [
            Row(*row) for line in self.curves["figures"][figure]["lines"] if line["run"] == run for row in line["rows"]
        ]

    def all(self, tag: str, style: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag and attributes.get("class") == style]


def report(capfd: pytest.CaptureFixture[str], root: Path, *names: str) -> Page:
    """The page that `launch.py report` wrote; it printed the path."""
    assert main(["report", *names, f"launch.root={root}"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return Page(Path(out.strip()))


def test_every_end_has_its_reason(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A reader who looks for a fault finds each end above the lane of time and in the table, with its own sign."""
    ends = [attempt(n, 100 * n, 100 * n + 90, (10 * n, 10 * n + 10), reason) for n, reason in enumerate(REASONS)]
    ends[3] |= {"error": "Traceback\n  ...\nValueError: <b>bad</b>"}
    make(root, "mine", [step(n, 1 / n) for n in range(1, 71)], ends)
    page = report(capfd, root, "mine")
    for reason in REASONS:
        assert len(re.findall(rf">{reason}<", page.source)) >= 2
        signs = [a for tag, a in page.elements if tag == "use" and a["href"] == f"#end-{reason}"]
        assert len(signs) == 2 and f'id="end-{reason}"' in page.source
    assert "ValueError: <b>bad</b>" in page.text


def test_an_end_is_marked_where_it_was(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Preempted after 25 of 100 seconds, at step 20."""
    ends = [
        attempt(0, 0, 25, (0, 20), "preempted", requeue=True),
        attempt(1, 40, 100, (20, 80), "finished"),
    ]
    page_of = make(root, "mine", [step(n, 1.0) for n in range(1, 81)], ends)
    page = report(capfd, root, "mine")
    assert page_of.report.exists()
    mark = next(a for tag, a in page.elements if tag == "use" and a["href"] == "#end-preempted")
    assert mark["x"] == "25.00%"
    queued = [a for a in page.all("rect", "queued") if "y" in a]
    assert [(a["x"], a["width"]) for a in queued] == [("25.000%", "15.000%")]
    saving = [(a["x"], a["width"]) for a in page.all("rect", "saving") if "y" in a]
    assert saving == [("20.000%", "5.000%"), ("80.000%", "20.000%")], "from the time of the last step"
    assert page.curves["runs"] == [{"name": "mine", "attempts": [[0, "preempted", 0], [1, "finished", 20]]}]


def test_many_ends(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that is preempted all day: there is no room for words above the lane, but each end has its sign."""
    ends = [attempt(n, 10 * n, 10 * n + 9, (n, n + 1), "preempted", requeue=True) for n in range(60)]
    make(root, "mine", [step(n, 1.0) for n in range(1, 61)], ends)
    page = report(capfd, root, "mine")
    assert len([a for tag, a in page.elements if tag == "use" and a["href"] == "#end-preempted"]) == 2 * 60
    assert not re.findall(r"<text[^>]*>preempted<", page.source)


def test_spans_of_time() -> None:
    """Lost seconds are not shown as running, a stop is not shown as a queue, and unknown saves are not shown at all."""
    records = [
        attempt(0, 0, 100, (0, 50), "preempted", requeue=True),
        attempt(1, 110, 200, (50, 90), "hung", requeue=True, lost_steps=5, lost_s=30.0),
        attempt(2, 220, 240, (85, 85), "cancelled"),
        attempt(3, 300, None, (85, 85), None),
    ]
    attempts = [ShownAttempt.of(record, True, BEGAN + 400, None) for record in records]
    spans = spans_of(attempts, {50: BEGAN + 95, 85: BEGAN + 150})
    assert [(span.kind, span.start - BEGAN, span.end - BEGAN) for span in spans] == [
        ("running", 0, 95),
        ("saving", 95, 100),
        ("queued", 100, 110),
        ("running", 110, 170),
        ("lost", 170, 200),
        ("queued", 200, 220),
        ("running", 220, 240),
        ("stopped", 240, 300),
        ("running", 300, 400),
    ]


def test_where_the_time_went(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The shares fill the bar, and each one is named with its share and its time."""
    attempts = [attempt(0, 0, 120, (0, 100), "failed", requeue=True), attempt(1, 200, 310, (100, 200), "finished")]
    metrics = [step(number, 0.5) for number in range(1, 101)]
    metrics += [step(number, 0.5, time=BEGAN + 110 + number) for number in range(101, 201)]
    make(root, "one", metrics, attempts)
    page = report(capfd, root, "one")
    for shown in ("training 64.5%, 3m 20s", "queue 25.8%, 1m 20s", "restarts 9.7%, 30s"):
        assert shown in page.text
    (bar,) = re.findall(r'aria-label="where the time went".*?</svg>', page.source)
    assert sum(map(float, re.findall(r'width="([\d.]+)%"', bar))) == pytest.approx(100, abs=0.01)
    make(root, "new")
    assert "Where the time went" not in report(capfd, root, "new").text


def test_a_killed_attempt_is_not_in_progress() -> None:
    """An attempt that was killed a week ago did not run for a week: it is drawn up to its last step."""
    left = attempt(0, 0, None, (0, 0), None)
    week = BEGAN + 7 * 86400
    killed = ShownAttempt.of(left, False, week, BEGAN + 60)
    assert spans_of([killed], {}) == [Span("running", BEGAN, BEGAN + 60)]
    assert killed.reason == "lost" and "unknown" in table([killed]), "nobody has counted its lost steps"
    assert "<th>ranks</th>" in table([killed]) and "<td>4</td>" in table([killed])
    assert spans_of([ShownAttempt.of(left, False, week, None)], {}) == []
    assert ShownAttempt.of(left, True, BEGAN + 60, BEGAN + 50).reason == "in progress"


def test_an_attempt_in_progress(root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is only in attempt.json, and has no end."""
    run = make(root, "mine", [step(n, 1.0) for n in range(1, 31)], [attempt(0, 0, 20, (0, 20), "preempted")])
    run.attempt_now.write_text(lines([attempt(1, 30, None, (20, 20), None, job_id="local-1")]))
    run.submissions.write_text(lines([{"job_id": "local-1", "time": BEGAN}]))
    monkeypatch.setattr("laststep.ranks.disk.lock_holder", lambda path: "job local-1")
    page = report(capfd, root, "mine")
    assert "running" in page.text and ">in progress<" in page.source and "from 20" in page.text


@pytest.mark.parametrize("steps", [1, 2, MAX_POINTS, MAX_POINTS + 1, 5 * MAX_POINTS + 7])
def test_a_curve_hides_nothing(steps: int) -> None:
    """Each step is in exactly one point, counts in its mean, and lies within its minimum and maximum; no gaps."""
    values = [((n * 7919) % 101) / 10 for n in range(steps)]
    curve = Curve()
    for n, value in enumerate(values):
        curve.add(n + 1, value)
    assert len(curve.points) <= MAX_POINTS
    at = 0
    for point in curve.points:
        assert point.first == at + 1
        own = values[at : point.last]
        assert (point.low, point.high, point.count) == (min(own), max(own), len(own))
        assert point.mean == pytest.approx(sum(own) / len(own))
        at = point.last
    assert at == steps
    assert steps > MAX_POINTS or len(curve.points) == steps, "one point per step while they fit"


def test_a_point_per_step_is_drawn(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The curve of a resumed run is one line, without a gap between the attempts."""
    ends = [attempt(0, 0, 50, (0, 50), "preempted"), attempt(1, 60, 160, (50, 150), "finished")]
    make(root, "mine", [step(n, 1 / n) for n in range(1, 151)], ends)
    page = report(capfd, root, "mine")
    for figure in (0, 1):  # the loss and the throughput
        assert [(row.first, row.last, row.count) for row in page.rows(figure)] == [(n, n, 1) for n in range(1, 151)]
    assert page.rows(0)[6].mean == 0.142857


def test_a_long_curve(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A month of training, of which a quarter is made here: the page takes seconds to make, a phone can load it, and it
    shows the only spike."""
    run = make(root, "mine")
    line = '{{"step": {0}, "epoch": 1, "loss": {1}, "lr": 0.1, "samples_per_s": 64.0, "time": {0}}}\n'
    with run.metrics.open("w") as file:
        file.writelines(line.format(n, 77.0 if n == 123_456 else 1.5) for n in range(1, 250_001))
    began = time.monotonic()
    page = report(capfd, root, "mine")
    assert time.monotonic() - began < 15  # 2.5 s on a busy machine
    assert len(page.source) - len(get_plotlyjs()) < 1_000_000
    spike = max(page.rows(0), key=lambda row: row.high)
    assert spike.high == 77.0 and spike.first <= 123_456 <= spike.last < spike.first + 125


def test_steps_that_were_not_finite(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are not on the curve, but must not vanish either. A torn last line must not spoil the page."""
    metrics = [
        step(n, None if n in (3, 4) else 1.0, **({"skipped": True} if n in (4, 9) else {})) for n in range(1, 11)
    ]
    epoch = {"epoch": 1, "step": 10, "train_loss": 1.0, "val_loss": None, "val_accuracy": 0.5}
    run = make(root, "mine", [*metrics, epoch])
    with run.metrics.open("a") as file:
        file.write('{"step": 11, "lo')
    page = report(capfd, root, "mine")
    assert [row.first for row in page.rows(0) if row.bad] == [3, 4, 9]
    assert [row.first for row in page.rows(0) if not row.count] == [3, 4]
    assert [row.bad for row in page.rows(1)] == [1], "the epoch's validation loss"
    assert "not finite" in page.text and "Validation accuracy" in page.text


def test_no_step_was_finite(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """There is a figure all the same, with a cross for every step."""
    make(root, "mine", [step(n, None) for n in range(1, 6)])
    page = report(capfd, root, "mine")
    assert "Training loss" in page.text and [row.bad for row in page.rows(0)] == [1] * 5


@pytest.mark.parametrize("metrics", [[], [step(1, 0.5)]], ids=["no step", "one step"])
def test_a_run_that_has_hardly_started(metrics: list[Any], root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The page says so, instead of an error or an empty frame, and has no plotly for nothing."""
    make(root, "mine", metrics)
    page = report(capfd, root, "mine")
    assert "No attempt has started yet" in page.text
    assert ("metrics.jsonl has no steps yet" in page.text) == (not metrics)
    assert len(page.scripts) == 3 * len(metrics)


def test_an_attempt_without_a_step(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It failed before its first step, within a second."""
    make(root, "mine", [], [attempt(0, 0, 0, (0, 0), "failed", error="")])
    page = report(capfd, root, "mine")
    assert ">failed<" in page.source and "0 to 0" in page.text


def test_several_runs(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Side by side: each has a colour, a name and a timeline, and the page lists the keys that differ."""
    for name, lr in (("slow", 0.01), ("fast", 0.5)):
        epoch = {"epoch": 1, "step": 20, "train_loss": lr, "val_loss": lr, "val_f1.macro": lr}
        ends = [attempt(0, 0, 30, (0, 20), "finished")]
        make(root, name, [*(step(n, lr / n) for n in range(1, 21)), epoch], ends, optim__lr=lr)
    page = report(capfd, root, "slow", "fast")
    assert Path("report.html").exists() and not list(root.rglob("report.html"))
    assert "2 runs" in page.text and "optim.lr" in page.text and "launch.name" not in page.text
    assert "Attempts of slow" in page.text and "Attempts of fast" in page.text
    assert "Validation f1.macro" in page.text
    assert [run["name"] for run in page.curves["runs"]] == ["slow", "fast"]
    assert [page.rows(0, run)[0].mean for run in (0, 1)] == [0.01, 0.5]
    assert len([tag for tag, a in page.elements if tag == "button" and a.get("aria-pressed") == "true"]) == 2


def test_more_runs_than_fit_side_by_side(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Twelve columns cannot be compared at a glance, and a sweep's command twelve times is noise: a row per run, the
    best on top by the metric that ranks checkpoints, a run without a result last, attempts folded."""
    command = ["laststep", "sweep", "--name", "lr", "optim.lr=0.1,0.2,0.3,0.4,0.5,0.6"]
    for number, accuracy in enumerate((0.5, 0.9, 0.7, None, 0.8, 0.6)):
        epoch = {"epoch": 3, "step": 20, "train_loss": 1.0, "val_loss": 1.0, "val_accuracy": accuracy}
        lr = (number + 1) / 10
        ends = [attempt(0, 0, 30, (0, 20), "finished")]
        settings: Any = {"optim__lr": lr, "checkpoint__best_by": "val_accuracy:max"}
        run = make(root, f"lr-{number}", [*(step(n, lr / n) for n in range(1, 21)), epoch], ends, **settings)
        typed = {"job_id": "7", "time": BEGAN, "command": command, "commit": "0123456789abcdef"}
        run.submissions.write_text(lines([typed]))
    page = report(capfd, root, *(f"lr-{number}" for number in range(6)))
    best_first = ["lr-1", "lr-4", "lr-2", "lr-5", "lr-0", "lr-3"]
    assert re.findall(r'<th scope="row".*?</svg>(lr-\d)</th>', page.source) == best_first
    assert [run["name"] for run in page.curves["runs"]] == best_first, "a row has the colour of its curves"
    assert "sorted by the highest val_accuracy; commit 0123456789" in page.text
    assert page.text.count(" ".join(command)) == 1 and page.text.count("0123456789") == 1
    assert re.search(r"<th>validation accuracy <small>epoch 3</small></th>", page.source), "said once"
    assert len(page.all("details", "fold")) == 6 and "open" not in "".join(page.all("details", "fold")[0])
    assert page.all("body", "many"), "as wide as the window"
    four = report(capfd, root, *(f"lr-{number}" for number in range(4)))
    assert four.text.count(" ".join(command)) == 4 and not four.all("body", "many"), "as ever"


def test_figures_say_what_they_are(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A loss without "of the last step" or "mean of the epoch" has misled readers; so does a rate without its step."""
    epoch = {"epoch": 2, "step": 20, "train_loss": 0.25, "val_accuracy": 0.5}
    steps = [step(n, 1 / n, lr=n / 100) for n in range(1, 31)]
    ends = [attempt(0, 0, 40, (0, 30), "cancelled", step_s=1.0)]
    page = report(capfd, root, make(root, "task", [*steps[:20], epoch, *steps[20:]], ends).name)
    for words in ("training loss0.25 mean of epoch 2", "validation accuracy0.5 epoch 2", "learning rate0.3 step 30"):
        assert words in page.text
    assert re.search(r"goodput\d+%", page.text)
    page = report(capfd, root, make(root, "custom", steps).name)
    assert "training loss0.03333 step 30" in page.text, "a custom loop has no epochs"


def test_where_a_run_comes_from(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weeks later the page still shows which commands ran which code."""
    commits = ["0123456789abcdef", "fedcba9876543210"]
    for name in ("one", "two"):
        first = {
            "job_id": "7",
            "time": BEGAN,
            "command": ["launch.py", "--name", name, "data.root=a b"],
            "commit": commits[0],
        }
        then = {"job_id": "8", "time": BEGAN + 9, "command": ["launch.py", "resume", name], "commit": commits[1]}
        make(root, name, [step(1, 1.0)]).submissions.write_text(lines([first, then]))
    page = report(capfd, root, "one")
    for words in ("launch.py --name one 'data.root=a b'", "launch.py resume one", "0123456789", "fedcba9876"):
        assert words in page.text
    page = report(capfd, root, "one", "two")
    for words in (
        "launch.py --name one 'data.root=a b'",
        "launch.py --name two 'data.root=a b'",
        "0123456789, fedcba9876",
    ):
        assert words in page.text


def test_written_where_asked(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To a web server's folder, say: then the run's folder, which may be another user's, is left alone."""
    run = make(root, "mine", [step(1, 1.0)])
    assert main(["report", "mine", "-o", "page.html", f"launch.root={root}"]) == 0
    assert capfd.readouterr().out == f"{Path('page.html').absolute()}\n"
    assert "Training loss" in Path("page.html").read_text() and not run.report.exists()
    assert main(["report", "mine", "--output", "missing/page.html", f"launch.root={root}"]) == 2
    assert "missing/page.html: cannot be written: No such file or directory" in capfd.readouterr().err


SEARCHED = os.environ["PATH"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOOK = """
(async () => {
  const [loss, speed] = document.querySelectorAll(".plot"), seen = {};
  const lines = plot => plot._fullData.filter(trace => (trace.mode || "").startsWith("lines") && trace.customdata);
  const look = name => { seen[name] = [lines(loss).length, lines(loss)[0].x.length, loss._fullLayout.yaxis.type]; };
  look("whole");
  seen.hover = lines(loss)[0].customdata[0];
  await Plotly.relayout(loss, {"xaxis.range[0]": 1000, "xaxis.range[1]": 1019});
  look("zoomed");
  seen.together = speed._fullLayout.xaxis.range;
  seen.step = lines(loss)[1].customdata.at(-1);
  loss.emit("plotly_doubleclick");
  look("back");
  document.querySelector("figcaption button").click();
  look("linear");
  document.querySelectorAll(".legend button")[1].click();
  look("hidden");
  seen.ends = loss._fullLayout.shapes.map(shape => shape.x0);
  document.title = JSON.stringify(seen);
})();
"""


def test_in_a_browser(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The curves are drawn; a reader can zoom in down to single steps, see values, and hide runs."""
    require(None if BROWSER else "no chromium on this machine: apt-get install chromium")
    assert BROWSER is not None
    ends = [attempt(0, 0, 500, (0, 500), "preempted"), attempt(1, 600, 2600, (500, 2000), "finished")]
    for name in ("one", "two"):
        make(root, name, [step(n, 1 / n) for n in range(1, 2001)], ends)
    page = report(capfd, root, "one", "two")
    probe = Path("probe.html")
    probe.write_text(page.source.replace("</body>", f"<script>{LOOK}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--virtual-time-budget=3000", "--window-size=1100,2000"]
    command += ["--dump-dom", probe.absolute().as_uri()]
    env = {**os.environ, "PATH": SEARCHED}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    seen = json.loads(html.unescape(re.findall("<title>(.*?)</title>", done.stdout)[0]))
    count, points, kind = seen["whole"]
    assert count == 2 and 100 <= points <= 250 and kind == "log"
    assert seen["hover"] == "one: 0.2113 (0.0625 to 1), mean of steps 1 to 16, attempt 0 (preempted)"
    assert seen["zoomed"] == [2, 22, "log"], "each step, and a neighbour on each side"
    assert seen["together"] == [1000, 1019], "the figures by step show the same steps"
    assert seen["step"] == "two: 0.0009804, attempt 1 (finished)"
    assert seen["back"] == seen["whole"]
    assert seen["linear"] == [2, points, "linear"]
    assert seen["hidden"] == [1, points, "linear"]
    assert seen["ends"] == [500], "of the run that is shown"


def test_nothing_comes_from_the_network(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The page works on a node without a network, and in years: it refers only to its own shapes and scripts."""
    make(root, "mine", [step(1, 1.0)], [attempt(0, 0, 1, (0, 1), "finished")])
    page = report(capfd, root, "mine")
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "img", "iframe", "object"})
    for _, attributes in page.elements:
        assert attributes.keys().isdisjoint({"src", "srcset", "xlink:href"})
        assert attributes.get("href", "#").startswith("#")
    style, _, body = page.source.partition("</style>")
    drawn = style + body.partition("<script")[0]
    assert set(re.findall(r"url\((.)", drawn)) == {"#"}
    assert "@import" not in drawn
    assert page.scripts[1] == get_plotlyjs(), "the library itself, whole"
    shapes = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    used = {a["href"][1:] for _, a in page.elements if "href" in a} | set(re.findall(r"url\(#([\w-]+)\)", drawn))
    assert used <= shapes


def test_every_text_is_escaped(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Folders can be renamed, and errors can quote anything: none of it may become markup of the page."""
    nasty = "a<script>alert(1)</script>&amp;\"'"
    record = attempt(0, 0, 1, (0, 1), "failed", job_id=nasty, hosts=[nasty], error=nasty)
    epoch = {"epoch": 1, "step": 1, "train_loss": 1.0, f"val_{nasty}": 0.5}
    for name in ("one", "two"):
        run = make(root, name, [step(1, 1.0), epoch], [record], data__root="'<script>'")
        run.path.rename(root / f"{name}<script>&")
    for names in (["one<script>&"], ["one<script>&", "two<script>&"]):
        page = report(capfd, root, *names)
        assert len(page.scripts) == 3, "the data, plotly, page.js"
        assert nasty in page.text and "one<script>&" in page.text
        assert page.curves["runs"][0]["name"] == "one<script>&"
    make(root, "A-1._b", [], [])
    assert "A-1._b" in report(capfd, root, "A-1._b").text


def test_without_plotly(root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python that submits jobs to a container may have only what a submission needs."""
    make(root, "mine", [step(1, 1.0)])
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    assert main(["report", "mine", f"launch.root={root}"]) == 2
    assert capfd.readouterr().err == (
        f"error: the report needs plotly, which {sys.executable} lacks: pip install plotly\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report"], "name the run, or its folder"),
        (["report", "launch.root=runs"], "name the run, or its folder"),
        (["report", "mime", "launch.root={root}"], "mime: no such run in {root}/; did you mean mine?"),
    ],
)
def test_wrong_input(words: list[str], says: str, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, which says what to do."""
    make(root, "mine")
    assert main([word.format(root=root) for word in words]) == 2
    assert capfd.readouterr().err == f"error: {says.format(root=root)}\n"


def test_a_folder_that_cannot_be_written(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Another user's run: the line says where the page should have been written."""
    run = make(root, "mine")
    run.report.mkdir()
    assert main(["report", "mine", f"launch.root={root}"]) == 2
    assert f"{run.report}: cannot be written: Is a directory" in capfd.readouterr().err


def test_a_damaged_configuration(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Half a file, with defaults for the rest, would describe a run that never was."""
    run = make(root, "mine", [step(1, 1.0)], optim__lr=0.25)
    whole = run.config.read_text()
    run.config.write_text(whole[: whole.index("\noptim:") + 1])
    assert main(["report", "mine", f"launch.root={root}"]) == 2
    assert "is damaged" in capfd.readouterr().err
    run.submissions.write_text(json.dumps({"job_id": "7", "time": 1.0, "config": whole}) + "\n")
    assert "lr: 0.25" in report(capfd, root, "mine").text, "from the copy of its submission"
