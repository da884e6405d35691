"""The list of deliberate faults fits the source; `make mutants` tries them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.listed import MUTANTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_fault_can_be_put_into_the_source(mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.within) == 1, f"expected this piece of text once: {mutant.within}"
    assert mutant.old in mutant.within
    assert mutant.old != mutant.new
    for test in mutant.tests:
        assert (ROOT / test).exists()


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 40
    assert len(set(MUTANTS)) == len(MUTANTS)
