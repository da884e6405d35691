"""`blockgate train`: a run by the name of its config, or from a JSON file."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from blockgate.cli.info import environment
from blockgate.lab.training import Run, load_run, shipped_configs, train
from blockgate.lab.training.config_files import defaults_taken

__all__ = ["train_command"]


class Train:
    """Trains a model: pick a config, change what you like.

    `laptop` configs take about 10 minutes on one core, `paper` ones follow the paper and want a GPU. Any JSON file with
    the same fields works in place of a name; "base": "NAME" in it starts from that config. `blockgate train NAME
    --help` lists all options. Ctrl-C saves a checkpoint and ends with code 130; with --resume, the same command
    continues, bit for bit as if it had never stopped. Progress goes to stderr; with --json the results come as one
    object on stdout.

    For example:
        blockgate train ptb-lstm-laptop --output runs/dense --model.matrices dense
        blockgate train ptb-lstm-laptop --output runs/90 --model.gate.sparsity 0.9
        blockgate train ptb-lstm-laptop --data my-texts --epochs 3 --output runs/mine
        blockgate train my-config.json --resume
    """

    config: Run
    json: bool
    # The JSON file that took the place of a name.
    file: ClassVar[Path | None] = None

    def run(self) -> None:
        """Trains, with progress on stderr."""
        if self.file is not None and (said := defaults_taken(self.file, self.config)):
            print(f"blockgate: {said}", file=sys.stderr)
        notes: dict[str, Any] = environment() | {"command": shlex.join(["blockgate", *sys.argv[1:]])}
        results = train(self.config, notes=notes)
        if self.json:
            print(json.dumps({"output": str(self.config.output), **results}, indent=2))


def train_command(args: list[str]) -> type:
    """`Train` with a subcommand for every config: those that are shipped, and the JSON file that `args` begins with."""
    file = next((word for word in args[1:2] if args[0] == "train" and word.endswith(".json")), None)
    configs = shipped_configs() | ({} if file is None else {file: load_run(Path(file))})
    described = {name: f"{type(run).__doc__} Data: {run.data}; {run.epochs} epochs." for name, run in configs.items()}
    choice: Any = tyro.extras.subcommand_type_from_defaults(configs, described, prefix_names=False)
    json_help = tyro.conf.arg(help="Print JSON, for scripts.")
    fields: list[Any] = [
        ("config", Annotated[choice, tyro.conf.arg(name="")]),
        # Cascading: before or after the name of the config.
        ("json", Annotated[bool, tyro.conf.CascadeSubcommandArgs, json_help], False),
    ]
    namespace = {"__doc__": Train.__doc__, "file": None if file is None else Path(file)}
    return make_dataclass("Train", fields, bases=(Train,), namespace=namespace, frozen=True)
