"""An experiment: a table or a figure, and the arms that it compares. Each is one file in the folder `experiments`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.training import Trained

__all__ = ["SCALES", "Experiment"]

SCALES = ("tiny", "laptop", "paper")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """What `blockgate reproduce NAME` trains and writes up.

    Args:
        name: of the command and of the report.
        about: what it shows, in a few words for the help.
        title: of the table.
        arms: its arms at a scale, in the order of its rows.
        draw: for a figure: draws it from the trained models into a folder, and returns the report in Markdown.
        more: makes further sections of the report, in Markdown, from the arms that have results and their results, and
            draws what belongs to them into a folder.
        seeds: how many runs at least some arms have, by their names; all others one, or as many as are asked for.
        levels: valid perplexities for which the report says how long training took to reach them; none: no such part.
        paper: the numbers that the paper prints, by the names of arms: test perplexity, or test error as a share.
    """

    name: str
    about: str
    title: str = ""
    arms: Callable[[str], list[Arm]]
    draw: Callable[[dict[Arm, Trained], Path], str] | None = None
    more: Callable[[Sequence[Arm], dict[str, list[dict[str, Any]]], Path], str] | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    levels: tuple[float, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
