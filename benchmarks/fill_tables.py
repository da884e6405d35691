"""Copies tables of result files into the README and the docs, so that no figure there is typed by hand.

A page says `<!-- table of FILE: HEADING -->` above a table; this puts the first table under that heading of the file,
or the file's first table if no heading is given, in its place. With `HEADING; only NAME, NAME` it keeps the columns of
these names. Run it after new measurements:

    python benchmarks/fill_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLACE = re.compile(r"(<!-- table of (\S+?)(?:: (.+?))?(?:; only (.+?))? -->\n)((?:\|.*\n)*)")


def table_in(text: str, heading: str | None) -> str:
    """The first table under a heading that starts with these words, or of the whole text."""
    start = 0
    if heading is not None:
        start = re.search(rf"^#+ {re.escape(heading)}", text, re.MULTILINE).start()
    return re.search(r"(?:^\|.*\n)+", text[start:], re.MULTILINE)[0]


def columns_of(table: str, names: str | None) -> str:
    """The columns of a table that a list "NAME, NAME" names, or all of them."""
    if names is None:
        return table
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    kept = [rows[0].index(name) for name in names.split(", ")]
    return "".join(f"| {' | '.join(row[column] for column in kept)} |\n" for row in rows)


def filled(page: str) -> str:
    """A page's text with every table as its file has it now."""
    return PLACE.sub(
        lambda place: place[1] + columns_of(table_in((ROOT / place[2]).read_text(), place[3]), place[4]), page
    )


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
