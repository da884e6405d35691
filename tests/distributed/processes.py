"""Runs scenarios in several processes that gloo connects, and in none: `python -m tests.distributed.processes`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

ROOT = Path(__file__).parents[2]
TIMEOUT = 280


def run(world: int, folder: Path, *names: str) -> dict[str, list[Any]]:
    """What the scenarios of these names return in each of `world` processes, by name and in the order of ranks."""
    folder.mkdir(exist_ok=True)
    (folder / f"rendezvous-{world}").unlink(missing_ok=True)
    command = [sys.executable, "-W", "error::UserWarning:blockgate", "-m", __name__, str(folder), str(world), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [text for process, text in zip(processes, said, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    return {name: [torch.load(folder / f"{name}-{world}-{rank}.pt") for rank in range(world)] for name in names}


def main(folder: str, world: str, *names: str) -> None:
    """One of the processes."""
    from tests.distributed import scenarios

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = f"file://{folder}/rendezvous-{world}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=int(world))
    for name in names:
        torch.save(getattr(scenarios, name)(Path(folder)), Path(folder) / f"{name}-{world}-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
