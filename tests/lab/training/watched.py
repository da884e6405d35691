"""`blockgate train`, whose processes write down what they are: `python -m tests.lab.training.watched train ...`.

torchrun and Lightning start it as they start `blockgate`. `WATCH` names the folder for the facts.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

import blockgate.cli.train as command
from blockgate.cli import main
from blockgate.lab.training import Hook, train


class Watch(Hook):
    """Writes a file with the facts about its process."""

    def __init__(self, model, updates_per_epoch):  # noqa: ARG002
        parameters = list(model.parameters())
        local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
        facts = {
            "world": world,
            "kinds": sorted({type(parameter.data).__name__ for parameter in parameters}),
            "dtypes": sorted({str(parameter.dtype) for parameter in parameters}),
            "share": sum(part.numel() for part in local) / sum(parameter.numel() for parameter in parameters),
            "threads": torch.get_num_threads(),
        }
        (Path(os.environ["WATCH"]) / f"{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    command.train = functools.partial(train, hooks=[Watch])
    sys.exit(main())
