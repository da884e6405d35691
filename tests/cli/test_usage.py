"""tyro's boxes in one line, as terminals with and without the characters for boxes show them."""

from __future__ import annotations

import pytest

from blockgate.cli.usage import in_one_line, overview

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
