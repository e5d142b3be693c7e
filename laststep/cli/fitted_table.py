"""Tables that fit a terminal: the less important columns give way before any cell is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.text import Text

GAP = 2  # columns of the terminal between two of the table


@dataclass(frozen=True)
class Column:
    """One column: its title, and a cell for each row.

    `gives_way`: the column with the lowest number is left out first; None: never. `least`: the width to which its cells
    may be cut when that is not enough; None: they are never cut. `cut_middle`: a cut cell keeps its end too.
    """

    title: str
    cells: Sequence[Text]
    left: bool = False  # aligned
    gives_way: int | None = None
    least: int | None = None
    cut_middle: bool = False

    @cached_property
    def width(self) -> int:
        """Wide enough for the title and every cell."""
        return max(len(self.title), *(cell.cell_len for cell in self.cells), 0)

    @property
    def least_width(self) -> int:
        """Its width once it is cut as far as it may be."""
        return self.width if self.least is None else min(self.width, max(self.least, len(self.title)))


class FittedTable:
    """The columns that fit into `width` (None: all of them), a line of text per row. Empty columns are left out."""

    def __init__(self, columns: Sequence[Column], width: int | None) -> None:
        self._columns = [column for column in columns if any(column.cells)]
        self._rows = len(columns[0].cells)
        if width is not None:
            self._leave_out(width)
        self._widths = [column.width for column in self._columns]
        if width is not None:
            self._cut(width)

    @property
    def header(self) -> Text:
        """The line of titles."""
        return self._line([Text(column.title) for column in self._columns], "bold")

    def rows(self) -> list[Text]:
        """A line per row."""
        return [self._line([column.cells[row] for column in self._columns]) for row in range(self._rows)]

    def _leave_out(self, width: int) -> None:
        while _total([column.least_width for column in self._columns]) > width:
            optional = [column for column in self._columns if column.gives_way is not None]
            if not optional:
                break
            self._columns.remove(min(optional, key=lambda column: column.gives_way or 0))

    def _cut(self, width: int) -> None:
        """Cut cells, those of the last column first. On a very narrow terminal the first column gives all the rest."""
        for number, column in reversed(list(enumerate(self._columns))):
            too_wide = max(0, _total(self._widths) - width)
            self._widths[number] -= min(too_wide, column.width - column.least_width)
        self._widths[0] = max(1, self._widths[0] - max(0, _total(self._widths) - width))

    def _line(self, cells: Sequence[Text], style: str = "") -> Text:
        line = Text(style=style, no_wrap=True, overflow="crop")
        for number, (cell, column, width) in enumerate(zip(cells, self._columns, self._widths)):
            if cell.cell_len > width:
                cell = _shortened(cell, width, column.cut_middle)
            gap, space = " " * GAP * bool(number), " " * (width - cell.cell_len)
            line.append(gap + space * (not column.left)).append_text(cell).append(space * column.left)
        line.rstrip()
        return line


def _shortened(cell: Text, width: int, middle: bool) -> Text:
    end = Text("")
    if middle and width > 2:
        end = cell[-((width - 1) // 2) :]
    cell = cell.copy()
    cell.truncate(width - end.cell_len, overflow="ellipsis")
    return cell.append_text(end)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)
