"""Draws a command and its output as an SVG picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tools.terminal import Line


def picture(command: str, lines: Sequence[Line], columns: int) -> str:
    """The picture of a terminal."""
    console = Console(record=True, width=columns + 1, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}"))
    for line in lines:
        console.print(Text.from_ansi(line.text))
    svg = console.export_svg(title="Laststep")
    # Load no fonts from the network; a viewer without these fonts uses its own.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
