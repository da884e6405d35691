"""tyro's boxes in one line, as terminals with and without the characters for boxes show them."""

from __future__ import annotations

import sys

import pytest

from blockgate.cli.usage import in_one_line, overview, program

BOX = """\
╭─ Unrecognized options ──────────────────────────────────────────────────────╮
│ Unrecognized options: --dat, y                                              │
│ ─────────────────────────────────────────────────────────────────────────── │
│ Perhaps you meant:                                                          │
│     --data {None}|STR                                                       │
│         Another data set.  Runs of dashes --- or --words like these stay.   │
│     --data-dir {None}|PATH                                                  │
│         in blockgate evaluate --help                                        │
│ ─────────────────────────────────────────────────────────────────────────── │
│ For full helptext, run blockgate evaluate --help                            │
╰─────────────────────────────────────────────────────────────────────────────╯
"""
DASHES = """\
 Unrecognized options
 ------------------------------------------------------------------------------
  Unrecognized options: --dat, y
  -----------------------------------------------------------------------------
  Perhaps you meant:
      --data {None}|STR
          Another data set.
      --data-dir {None}|PATH
  -----------------------------------------------------------------------------
  For full helptext, run blockgate evaluate --help

"""


@pytest.mark.parametrize("drawn", [BOX, DASHES], ids=["box", "dashes"])
def test_what_is_wrong_and_what_was_meant(drawn):
    assert in_one_line(drawn, "blockgate evaluate") == (
        "Unrecognized options: --dat, y. Perhaps you meant --data or --data-dir. See: blockgate evaluate --help"
    )


def test_a_box_of_another_kind_keeps_all_its_words():
    assert in_one_line("something\nelse  entirely\n", "blockgate info") == "something else entirely"


def test_the_overview_has_a_line_for_each_command():
    class Made:
        """Makes it.

        And more.
        """

    assert overview("What it is.", {"make": Made}).splitlines()[-1] == "  make  Makes it."


@pytest.mark.parametrize(
    ("beside", "on_path", "called"),
    [
        (True, False, ".venv/bin/blockgate"),
        (True, True, "blockgate"),
        (False, False, "{}/.venv/bin/python -m blockgate"),
    ],
)
def test_the_program_is_called_so_that_a_shell_finds_it(beside, on_path, called, tmp_path, monkeypatch):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    if beside:
        (folder / "blockgate").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder) if on_path else "/nowhere")
    assert program() == called.format(tmp_path)


def test_the_program_of_another_folder_is_called_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "other place").mkdir()
    (tmp_path / "other place" / "blockgate").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "other place" / "python"))
    assert program() == f"'{tmp_path}/other place/blockgate'"
