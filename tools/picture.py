"""Draws a command and its output as an SVG picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape, unescape

from rich.console import Console
from rich.text import Text


def picture(command: str, lines: Sequence[str], columns: int) -> str:
    """The picture of a terminal: dark, so that it is legible on light and on dark pages."""
    console = Console(record=True, width=columns + 1, file=io.StringIO(), force_terminal=True)
    for text in (Text(f"$ {command}"), *map(Text.from_ansi, lines)):
        for row in wrapped(text, columns):
            console.print(row, no_wrap=True)
    svg = console.export_svg(title="Laststep").replace("</svg>", f"{keeps(command, lines)}</svg>", 1)
    # Load no fonts from the network; a viewer without these fonts uses its own.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def keeps(command: str, lines: Sequence[str]) -> str:
    """The element of a picture that keeps the text it is made from."""
    text = "\n".join([f"$ {command}", *(Text.from_ansi(line).plain for line in lines)])
    return f"<metadata>{escape(text)}\n</metadata>\n"


def text_of(svg: str) -> str:
    """The text that a picture was made from."""
    return unescape("".join(re.findall(r"<metadata>(.*?)</metadata>", svg, flags=re.DOTALL)))


def wrapped(text: Text, columns: int) -> list[Text]:
    """The rows of a terminal that a line fills."""
    text.expand_tabs(8)
    return [text[at : at + columns] for at in range(0, max(1, len(text)), columns)]
