"""Tables for terminals and Markdown, and numbers short enough for them."""

from __future__ import annotations

__all__ = ["markdown_table", "short", "text_columns", "text_table", "to_percent"]

# The first columns of our tables are names; numbers line up on the right.
NAME_COLUMNS = 2


def text_table(head: list[str], rows: list[list[str]]) -> str:
    """Aligned columns, a rule under the head and one above the last row, which is the total."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))

    def line(row: list[str]) -> str:
        cells = (
            c.ljust(w) if i < NAME_COLUMNS else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), rule, *map(line, rows[:-1]), rule, line(rows[-1])])


def text_columns(head: list[str], rows: list[list[str]]) -> str:
    """Aligned columns of words, with a rule under the head."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """The same in Markdown."""
    marks = ["---" if i < NAME_COLUMNS else "--:" for i in range(len(head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, marks, *rows))


def short(number: float) -> str:
    """Whole numbers up to 9999, then four digits and a unit: 9216, 1.573M, 21.23M."""
    if number < 9999.5:
        return f"{number:.0f}"
    unit = ""
    for larger in "kMGT":
        if number < 999.95:
            break
        number, unit = number / 1000, larger
    digits = 3 if number < 9.9995 else 2 if number < 99.995 else 1
    return f"{number:.{digits}f}{unit}"


def to_percent(share: float | None) -> str:
    """A share as a percentage; a dash for none."""
    return "-" if share is None else f"{share:.1%}"
