"""One campaign in this process: `python -m blockgate.lab.selftest ORDER FILE`, for `blockgate selftest`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from blockgate.checkpoint.atomic import write_whole
from blockgate.lab.selftest.campaign import Campaign, run_campaign


def main() -> None:
    """Runs what the order says, and keeps the file up to date."""
    order, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)

    def note(campaign: Campaign) -> None:
        write_whole(file, json.dumps(campaign.to_json()))

    run_campaign(**order, note=note)


if __name__ == "__main__":
    main()
