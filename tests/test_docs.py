"""The documentation says what the code does."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.support.needs import require
from tests.support.project import PROJECT
from tools import a_day, benchmarks, commands, house, pictures, recording, reference, report, scale, sections
from tools.picture import text_of
from tools.terminal import normalised


def test_configuration_reference_is_current() -> None:
    """A key that the page lacks, or describes as it was, sends users wrong. The cure: python -m tools.reference"""
    assert reference.TARGET.read_text() == reference.reference()


def test_scale_page_is_current() -> None:
    """Otherwise it would quote outdated figures. To update it: python -m tools.scale"""
    assert scale.TARGET.read_text() == scale.page()


def test_commands_page_is_current() -> None:
    """A page that shows other options than the command has sends users wrong. To update it: python -m tools.commands"""
    assert commands.TARGET.read_text() == commands.page()


def test_benchmarks_page_is_current() -> None:
    """Otherwise it would quote outdated figures. To update it: python -m tools.benchmarks"""
    assert benchmarks.TARGET.read_text() == benchmarks.page()


def test_readme_is_short() -> None:
    """A newcomer reads one page, not a manual; the rest belongs into docs/."""
    assert len((PROJECT / "README.md").read_text().split()) <= 700


def test_what_a_custom_loop_changes() -> None:
    """The page promises that little of a loop must change, and shows all of the difference."""
    plain, custom = (
        (PROJECT / "examples" / f"{name}_loop.py").read_text().splitlines() for name in ("plain", "custom")
    )
    _, _, *difference = difflib.unified_diff(plain, custom, lineterm="", n=0)
    assert "\n".join(difference) in (PROJECT / "docs" / "custom-loops.md").read_text()
    assert sum(line.startswith("+") for line in difference) <= 20


@pytest.mark.parametrize("port", ["lightning", "trl", "accelerate"])
def test_what_a_port_changes(port: str) -> None:
    """The page shows all that changes in a script."""
    scripts = (PROJECT / "examples" / "ports" / port / f"{name}.py" for name in ("original", "ported"))
    before, after = (script.read_text().splitlines() for script in scripts)
    _, _, *difference = difflib.unified_diff(before, after, lineterm="", n=0)
    assert "\n".join(difference) in (PROJECT / "docs" / "frameworks.md").read_text()


def test_the_recording_types_what_readme_says() -> None:
    """The picture shows the commands that README invites the reader to type, so both must be the same."""
    typed = [line.split("  #")[0].strip() for line in (PROJECT / "README.md").read_text().splitlines()]
    picture = (PROJECT / "docs" / "recording.svg").read_text()
    shown = re.sub(r"<[^>]+>", "", picture)
    for command, _ in recording.JOURNEY:
        assert command in typed
        assert command.replace('"', "&quot;") in shown, "to record it again: python -m tools.pictures recording"


def test_the_pictures_need_nothing_else() -> None:
    """GitHub shows an SVG without its scripts, and without what it would load from elsewhere."""
    for picture in (PROJECT / "docs").glob("*.svg"):
        text = picture.read_text()
        ElementTree.fromstring(text)
        assert not re.search(r"<script|@import|@font-face|href=|url\(http", text), picture


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page.name}" for page in (PROJECT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    """Pages are read in the repository, too: every link and picture is there, relative to the page."""
    path = PROJECT / page
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_the_site_has_every_page() -> None:
    """A page that the navigation lacks is found by nobody; the strict build does not notice it."""
    listed = re.findall(r'"([\w-]+\.md)"', (PROJECT / "zensical.toml").read_text())
    assert sorted(listed) == sorted(page.name for page in (PROJECT / "docs").glob("*.md"))


def test_the_site_builds(tmp_path: Path) -> None:
    """`make docs`: a link to a page or heading that is not there is an error, and nothing is loaded from elsewhere."""
    require(None if find_spec("zensical") else "no zensical: pip install -e '.[docs]'")
    shutil.copytree(PROJECT / "docs", tmp_path / "docs")
    for name in ("zensical.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(PROJECT / name, tmp_path / name)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert not re.findall(r'<(?:script|img)[^>]+src="https?:|<link[^>]+stylesheet[^>]+href="https?:', home)
    # Of a page that includes a part of another one, zensical checks the links before it includes it.
    pages = {page: page.read_text() for page in (tmp_path / "site").glob("*.html") if page.name != "404.html"}
    links = [(page, link) for page, text in pages.items() for link in re.findall(r'<a[^>]+href="([^":?#]+)[#"]', text)]
    assert len(links) > 1000
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_files_that_design_names_exist() -> None:
    """The page says where everything is: a reference to a file that has moved would mislead a newcomer."""
    text = (PROJECT / "docs" / "design.md").read_text()
    named = set(re.findall(r"`((?:laststep|trainer|tests|benchmarks|examples|docs|tools)/[\w./]+)`", text))
    assert len(named) > 40, "the page answers by the names of files"
    assert [name for name in sorted(named) if not (PROJECT / name).exists()] == []


def test_every_picture_is_drawn_by_the_script() -> None:
    """One that is not would show old messages for good; one that no page shows is not worth its bytes."""
    drawn = {name for _, names in [*pictures.TERMINALS.values(), *pictures.OTHERS.values()] for name in names}
    kept = {path.name for path in (PROJECT / "docs").iterdir() if path.suffix in (".svg", ".png")}
    assert kept == drawn
    pages = "".join(path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    assert [name for name in sorted(kept) if f"({name})" not in pages] == []


SLURM_MISSING = None if os.geteuid() == 0 and shutil.which("slurmctld") else "no Slurm, or not root"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.retyped] if name != "local" else []) for name in pictures.TERMINALS]
)
def test_a_picture_shows_what_is_printed_today(name: str) -> None:
    """A picture of an older version makes a reader look for lines that no longer exist. Each keeps the text that it was
    made from; its commands are typed again here, and times, hosts, numbers and paths do not count."""
    if name != "local":
        require(SLURM_MISSING)
    for file, now in pictures.drawn(name).items():
        kept = text_of((pictures.DOCS / file).read_text())
        assert pictures.stale(kept, text_of(now)) == [], f"to draw it again: python -m tools.pictures {name}"


@pytest.fixture(scope="module")
def said() -> str:
    """All texts of the program."""
    texts = (text for path in (PROJECT / "laststep").rglob("*.py") for text in _texts(path))
    return "\n".join([*texts, pictures.TASK, "resuming with threads"])  # joined of names when it is said


@pytest.mark.parametrize("name", [file for _, files in pictures.TERMINALS.values() for file in files])
def test_a_picture_says_what_the_program_still_says(name: str, said: str) -> None:
    """The quick half of the test above, where no Slurm is: the words of each message, and each title of a table, stand
    in a text of the program. To draw one again: python -m tools.pictures"""
    command, *lines = normalised(text_of((pictures.DOCS / name).read_text()))
    messages = [line.partition("] ")[2] for line in lines if "[laststep" in line]
    phrases = [each.strip() for line in messages for each in re.split(r"[^a-z' ]+|\branks?\b", line)]
    phrases = [each for each in phrases if each.count(" ") >= 2]
    titles = [word for line in lines if line.startswith(("run state", "attempt state")) for word in line.split()]
    assert phrases or titles, command
    assert [each for each in (*phrases, *titles) if each not in said] == []


def _texts(path: Path) -> Iterator[str]:
    """The texts in a module; in an f-string, 0 stands for each value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.retyped
def test_the_picture_of_the_report_shows_todays_page(tmp_path: Path) -> None:
    """As above; the picture can be drawn by a browser only, its text needs none."""
    report.train(tmp_path)
    with Image.open(pictures.DOCS / "report.png") as picture:
        kept = picture.info["Text"]
    assert pictures.stale(kept, report.text_of(report.made(tmp_path))) == [], "python -m tools.pictures report"


def test_a_stale_picture_is_found() -> None:
    """A changed word counts; a time, a host, a path, a rate or a bar does not."""
    kept = (
        "$ laststep --local\nfolder /tmp/a/runs/first\n[laststep 10:00:00] step 10/90  loss 0.5  lr 0.1  90 samples/s"
    )
    now = (
        "$ laststep --local\nfolder /home/b/runs/first\n[laststep 11:30:07] step 60/90  loss 2.25  lr 0.1  7 samples/s"
    )
    assert pictures.stale(kept, now) == []
    assert pictures.stale(kept, now.replace("folder", "in")) == ["- folder PATH", "+ in PATH"]
    cut = "nan-lr  failed  step 2: the loss is not fin…\nwide  queued  starts 21:27:32, Resour…"
    assert pictures.stale(cut, cut.replace(" not fin…", "…").replace("Resour…", "Re…")) == []
    assert pictures.stale(cut, cut.replace("failed", "lost")) != []
    assert pictures.stale(now, f"{now}\n[laststep 11:30:08] epoch 1  step 63  train_loss 0.5") == []


def test_the_recording_opens_on_a_frame_that_shows_something() -> None:
    """Many pages show the first frame alone."""
    picture = (PROJECT / "docs" / "recording.svg").read_text()
    first = re.findall(r"@keyframes (r\d+) \{ 0% \{ visibility: hidden; \} 0\.000%", picture)
    assert len(first) >= 5
    assert text_of(picture).count("attempt begins") <= 3, "one at the start; two in the log that is read a second time"


@pytest.mark.retyped
def test_the_day_is_as_it_was_written_down() -> None:
    """The page is what a newcomer compares the screen with, line by line. To write it again: python -m tools.a_day"""
    page = a_day.PAGE.read_text()
    assert pictures.stale("\n".join(a_day.printed(page)), "\n".join(a_day.printed(a_day.live(page)))) == []


def test_walks_are_short_and_lead_somewhere() -> None:
    """A newcomer follows a walk file by file; one that names a file that is gone, or needs more files than one can keep
    in mind, is none. The cure: `python -m tools.house`"""
    assert house.wrong_walks() == []


def test_a_report_replaces_its_own_section(tmp_path: Path) -> None:
    """docs/reports.md is written by ten commands: one that dropped the section of another would lose a proof."""
    page = tmp_path / "page.md"
    page.write_text("# Reports\n\nAbout.\n\n## One\n\nold\n\n## Two\n\nkept\n")
    sections.put("## One\n\nnew\n", page)
    sections.put("## Three\n\nadded\n", page)
    assert page.read_text() == "# Reports\n\nAbout.\n\n## One\n\nnew\n\n## Two\n\nkept\n\n## Three\n\nadded\n"
    with pytest.raises(ValueError, match="begins with its heading"):
        sections.put("# Reports\n", page)


def test_each_report_has_a_command_that_writes_it() -> None:
    """Under another heading, the command would add its section a second time, and the old figures would stay."""
    written = "".join(
        path.read_text() for folder in ("tests", "tools", "benchmarks") for path in (PROJECT / folder).rglob("*.py")
    )
    headings = re.findall(r"^## .+$", sections.REPORTS.read_text(), re.MULTILINE)
    assert len(headings) >= 8
    assert [
        heading for heading in headings if not re.search(rf'^\s*"?{re.escape(heading)}(\\|"|$)', written, re.M)
    ] == []
