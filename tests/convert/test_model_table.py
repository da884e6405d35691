"""The page of supported models says what the models of the zoo really do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.model_table import PAGE, attempt, filled, packs, row, saves, trains
from tests.model_zoo import CASES


def test_the_page_is_what_comes_of_it():
    page = PAGE.read_text()
    assert filled(page) == page, "run: python -m tests.model_table"


class Deaf(nn.Module):
    """Its second layer is never called, so that nothing reaches its gate."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.one(x).relu())


class Forgetful(nn.Sequential):
    """Keeps a tensor that no state_dict has."""

    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.Linear(64, 5))
        self.shift = torch.randn(5)

    def forward(self, x):
        return super().forward(x) + self.shift


def test_what_does_not_work_is_not_called_supported():
    good = CASES["tagger"]
    assert [attempt(step, good) for step in (trains, packs, saves)] == ["yes", "all formats", "yes"]
    deaf = replace(good, make=Deaf, example=lambda: torch.randn(3, 32))
    assert attempt(trains, deaf) == "no"
    assert attempt(saves, replace(deaf, make=Forgetful)) == "no"
    assert attempt(trains, replace(deaf, example=lambda: torch.randn(3, 31))) == "no: InvalidInputError"


@pytest.mark.parametrize("name", ["tagger"])
def test_a_row_counts_layers_of_each_kind(name):
    assert row(name, CASES[name])[:4] == [name, "`Tagger`", "1 LSTM, 1 Linear", "1 Linear"]
