"""`blockgate reproduce`: the tables and figures of the paper."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from blockgate.cli.output import print_markdown
from blockgate.lab.reproduce import EXPERIMENTS, Order, choose_arms, reproduce
from blockgate.lab.reproduce.results import RESULT

__all__ = ["Reproduce"]

# One file of the laboratory makes an experiment known here.
if TYPE_CHECKING:
    ExperimentName = str
else:
    ExperimentName = tyro.extras.literal_type_from_choices(EXPERIMENTS)

WHAT = "; ".join(f"{name}: {experiment.about}" for name, experiment in EXPERIMENTS.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduce(Order):
    """Repeats a table or figure of the paper: trains its models and shows the paper's numbers beside ours.

    Every arm (a model of the table, with a seed) is a training run in its own folder. Finished arms are not run again.
    Ctrl-C stops with code 130, and the same command continues. `tiny` takes a minute on made-up data, `laptop` 3 to 10
    minutes an arm on one core (`medium` 1 to 3 hours, `medium-qrnn` up to 1 hour). `paper` follows the paper and wants
    a GPU for the language models. Data sets come from `blockgate data fetch`.

    For example:
        blockgate reproduce table2 --scale tiny
        blockgate reproduce table2 --list
        blockgate reproduce table2 --arms 'ptb-lstm-*' --jobs 2 --time
        blockgate reproduce table2 --scale paper --cluster slurm --slurm.partition gpu --slurm.gpus 1 --jobs 50
        blockgate reproduce mnist --scale paper --seeds 3
        blockgate reproduce medium --arms 'ptb-medium-*' --dropout dense 0.5 margin 0.3 --time
        blockgate reproduce wide --levels 200 180 160
        blockgate reproduce figure2 --arms 'ptb-qrnn-*-50' --output runs/reproduce
    """

    experiment: Annotated[ExperimentName, tyro.conf.Positional, tyro.conf.arg(help=f"{WHAT}.")]
    list: bool = False
    """Only list the arms."""
    json: bool = False
    """Print JSON, for scripts: the results of the arms, or their list."""

    def run(self) -> None:
        """Runs, with progress on stderr, and prints the report."""
        arms = choose_arms(self.experiment, self.scale, self.arms)
        if self.list and self.json:
            print(json.dumps([{"name": arm.name, "label": arm.label} | asdict(arm) for arm in arms], indent=2))
            return
        if self.list:
            for arm in arms:
                print(f"{arm.name:<36}{arm.label}")
            return
        report = reproduce(self)
        if self.json:
            files = [file for arm in arms for file in sorted((report.parent / arm.name).glob(f"seed-*/{RESULT}"))]
            results = [json.loads(file.read_text()) for file in files]
            print(json.dumps({"report": str(report), "results": results}, indent=1))
            return
        print_markdown(report.read_text())
        Console(stderr=True).print(f"written to {report}", highlight=False)
