"""A table of results, for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

import rich.table
from rich.console import Console


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words and figures, already formatted."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    """How many columns, from the left, hold words; the others are figures and end flush right."""

    def show(self) -> None:
        """Print it."""
        table = rich.table.Table()
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.words else "right")
        for row in self.rows:
            table.add_row(*row)
        # Not wrapped if this is no terminal: logs are searched by lines.
        console = Console()
        console = console if console.is_terminal else Console(width=150)
        console.print(self.title, highlight=False)
        console.print(table)

    def markdown(self) -> str:
        """The title as a line of its own, and the table."""
        rules = ["---" if number < self.words else "---:" for number in range(len(self.columns))]
        lines = [_line(cells) for cells in (self.columns, rules, *self.rows)]
        return f"*{self.title}*\n\n" + "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
