"""Markdown on terminals wide and narrow, and into pipes: no table loses a cell."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from blockgate.cli import output, parse

TABLE = f"| arm | note |\n|---|---|\n| a | {'long ' * 20}end |"


@pytest.mark.parametrize(("terminal", "width", "drawn"), [(True, 200, True), (True, 80, False), (False, 80, False)])
def test_no_table_is_cut(terminal, width, drawn, monkeypatch, capsys):
    shown = io.StringIO()
    monkeypatch.setattr(output, "Console", lambda: Console(file=shown, force_terminal=terminal, width=width))
    output.print_markdown(TABLE)
    printed = shown.getvalue() + capsys.readouterr().out
    assert "long end" in printed
    assert "…" not in printed
    assert ("|---|" not in printed) == drawn


def test_bench_linear_measures_what_the_library_makes():
    command = parse(["bench", "linear"])
    assert (command.gate, command.select, command.block) == ("margin", "per_row", ("256x16",))
