"""Draws commands and their output as an animated SVG of a terminal: CSS only, no script, so GitHub shows it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from tools.picture import keeps, wrapped
from tools.terminal import Line

ROWS = 24
WIDTH, HEIGHT = 8.4, 18.0  # of a character, in pixels
MARGIN, TITLE = 14.0, 36.0
KEY_S = 0.03  # for each character typed
THINK_S, READ_S, LAST_S = 0.6, 2.0, 5.0  # before each command; to read the first and the final picture
FASTER, LONGEST_S = 4.0, 1.5  # output is shown this many times faster, and no wait is longer

STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }
text { fill: #c5c8c6; }
.title { fill: #8b8e8c; }
.back { fill: #292929; }
.cursor { fill: #c5c8c6; }
.typing, .clock { visibility: hidden; }
.clock:last-of-type { visibility: visible; }
"""


@dataclass
class Scene:
    """A command, the lines it printed, and the seconds it took."""

    command: str
    lines: list[Line]
    took: float


@dataclass
class Row:
    """A row of the terminal: its text, when it appears, and when typing in it begins and ends if it is a command."""

    at: float
    text: Text
    typing: tuple[float, float] | None = None


class Film:
    """The rows of all scenes on one timeline, in seconds of the animation."""

    def __init__(self, scenes: Sequence[Scene], columns: int) -> None:
        self.columns = columns
        self.rows: list[Row] = []
        self.clock: dict[int, float] = {0: 0.0}  # seconds of the recording: when they are shown
        self.length = real = 0.0
        for number, scene in enumerate(scenes):
            if number:
                self._type(scene.command)
            else:  # the first frame, a still for many viewers, shows a command and what it printed
                self.rows = [Row(0.0, Text.assemble("$ ", (scene.command, "bold")))]
            before = 0.0
            for line in scene.lines:
                self.length += min((line.at - before) / FASTER, LONGEST_S) if number else 0.0
                before = line.at
                if number:
                    self.clock.setdefault(int(real + line.at), self.length)
                self.rows += [Row(self.length, text) for text in wrapped(Text.from_ansi(line.text), columns)]
            real += scene.took
            self.length += 0.0 if number else READ_S
        self.rows.append(Row(self.length, Text("$ ")))
        self.length += LAST_S

    def _type(self, command: str) -> None:
        """Show the prompt, then each character."""
        first = self.length + THINK_S
        last = first + KEY_S * len(command)
        (text,) = wrapped(Text.assemble("$ ", (command, "bold")), self.columns)  # a command must fit into one row
        self.rows.append(Row(self.length, text, (first, last)))
        self.length = last + 0.2


def animate(scenes: Sequence[Scene], columns: int) -> str:
    """The animated picture. Without animation it shows the end."""
    film = Film(scenes, columns)
    width, height = columns * WIDTH + 2 * MARGIN, ROWS * HEIGHT + TITLE + MARGIN
    body, style = [], [STYLE]
    for index, row in enumerate(film.rows):
        body.append(_text(row.text, index * HEIGHT + 0.75 * HEIGHT, f"r{index}"))
        style.append(_appears(f"r{index}", row.at, film.length))
        if row.typing:
            body.append(_typing(index, columns))
            style.append(_moves(index, row, film.length))
    style.append(_scrolls(film))
    clock, seconds = [], list(film.clock.items())
    for (second, at), (_, until) in zip(seconds, [*seconds[1:], (0, film.length)]):
        clock.append(
            f'<text class="clock title c{second}" x="{width - MARGIN - 5 * WIDTH}" y="23">{_clock(second)}</text>'
        )
        style.append(_appears(f"c{second}", at, film.length, until))
    style.append("@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }")
    size = f'width="{width:g}" height="{height:g}"'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width:g} {height:g}" {size}>
<style>{chr(10).join(style)}</style>
<rect class="back" {size} rx="8"/>
<circle cx="20" cy="18" r="6" fill="#ff5f57"/><circle cx="40" cy="18" r="6" fill="#febc2e"/>
<circle cx="60" cy="18" r="6" fill="#28c840"/>
<text class="title" x="{width / 2:g}" y="23" text-anchor="middle">4 ranks on 2 nodes of a real Slurm</text>
<g>
{chr(10).join(clock)}
</g>
<svg x="{MARGIN:g}" y="{TITLE:g}" width="{columns * WIDTH:g}" height="{ROWS * HEIGHT:g}">
<g class="screen">
{chr(10).join(body)}
</g>
</svg>
{"".join(keeps(scene.command, [line.text for line in scene.lines]) for scene in scenes)}</svg>
"""


def _text(text: Text, y: float, name: str) -> str:
    """A row, each part with its colour, every character in its column."""
    parts = "".join(
        f'<tspan x="{start * WIDTH:g}" textLength="{len(part) * WIDTH:g}"{style}>{escape(part)}</tspan>'
        for start, part, style in _parts(text)
        if part.strip()
    )
    return f'<text class="{name}" y="{y:g}">{parts}</text>'


def _parts(text: Text) -> Iterator[tuple[int, str, str]]:
    """First column, characters, and attributes of each part of one style."""
    start = 0
    console = Console(color_system="truecolor", force_terminal=True, file=io.StringIO(), width=1000)
    for segment in text.render(console):
        if segment.text in ("", "\n"):
            continue
        style = ""
        if segment.style and segment.style.color:
            style += f' fill="{segment.style.color.get_truecolor(SVG_EXPORT_THEME).hex}"'
        if segment.style and segment.style.bold:
            style += ' font-weight="bold"'
        if segment.style and segment.style.dim:
            style += ' opacity="0.6"'
        yield start, segment.text, style
        start += len(segment.text)


def _typing(index: int, columns: int) -> str:
    """What hides the characters of a command that are not typed yet, with the cursor at its left."""
    box = f'x="{2 * WIDTH:g}" y="{index * HEIGHT:g}" height="{HEIGHT:g}"'
    return (
        f'<g class="typing t{index}"><rect class="back" {box} width="{columns * WIDTH:g}"/>'
        f'<rect class="cursor" {box} width="{WIDTH:g}"/></g>'
    )


def _appears(name: str, at: float, length: float, until: float | None = None) -> str:
    """Hide something until `at`, and from `until`."""
    end = f" {_percent(until, length)} {{ visibility: hidden; }}" if until and until < length else ""
    return (
        f".{name} {{ animation: {name} {length:g}s step-end infinite; }}"
        f" @keyframes {name} {{ 0% {{ visibility: hidden; }} {_percent(at, length)} {{ visibility: visible; }}{end} }}"
    )


def _moves(index: int, row: Row, length: float) -> str:
    """Move the cursor over a command as it is typed."""
    assert row.typing is not None
    first, last = row.typing
    characters = len(row.text) - 2
    return (
        f".t{index} {{ animation: t{index} {length:g}s step-end infinite; }} @keyframes t{index} {{"
        f" 0% {{ visibility: hidden; }} {_percent(row.at, length)} {{ visibility: visible; }}"
        f" {_percent(first, length)} {{ visibility: visible; transform: none;"
        f" animation-timing-function: steps({characters}); }}"
        f" {_percent(last, length)} {{ visibility: visible; transform: translateX({characters * WIDTH:g}px); }}"
        f" {_percent(last + 0.2, length)} {{ visibility: hidden; }} }}"
    )


def _scrolls(film: Film) -> str:
    """Keep the last row in view."""
    frames, shown = ["0% { transform: none; }"], 0
    for index, row in enumerate(film.rows):
        over = max(0, index + 1 - ROWS)
        later = film.rows[index + 1].at if index + 1 < len(film.rows) else film.length
        if over > shown and later > row.at:
            frames.append(f"{_percent(row.at, film.length)} {{ transform: translateY({-over * HEIGHT:g}px); }}")
            shown = over
    end = f"transform: translateY({-shown * HEIGHT:g}px); animation: screen {film.length:g}s step-end infinite;"
    return f".screen {{ {end} }} @keyframes screen {{ {' '.join(frames)} }}"


def _percent(at: float, length: float) -> str:
    return f"{100 * at / length:.3f}%"


def _clock(seconds: int) -> str:
    return f"{seconds // 60}:{seconds % 60:02}"
