"""Train a gated model over any number of processes, sharded: a plain script for torchrun.

    torchrun --standalone --nproc-per-node 2 examples/train_many.py
    torchrun --standalone --nproc-per-node 4 examples/train_many.py --steps 600    # goes on, on other processes

Weights, gradients and the optimizer's state are spread by `fully_shard`, checkpoints written by
torch.distributed.checkpoint. Three lines are about gates: `share_means`, `shared=True` and `record.gather()`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import blockgate as bg
from blockgate.gates import share_means
from blockgate.inspect import gate_losses

BATCH, FEATURES, CLASSES = 64, 64, 8


def make_model(width: int) -> nn.Sequential:
    """Two wide gated layers between dense ones, the same in every process."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), *blocks, nn.Linear(width, CLASSES))
    bg.sparsify_(model, block_size=32, sparsity=0.0)
    # Gates count means of what they see: of all rows, not of those of one process.
    share_means(model)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """This process's rows of a batch that the step decides: which of eight hidden directions is the strongest."""
    directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(1))
    x = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step + 2))
    x = x[distributed.get_rank() :: distributed.get_world_size()]
    return x, (x @ directions).argmax(-1)


def main(steps: int, width: int, folder: Path) -> None:
    """Trains, from the checkpoint on if there is one."""
    distributed.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    model = make_model(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ramp = bg.SparsityRamp(model, final=0.75, begin=steps // 4, end=steps // 2)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
    if (folder / ".metadata").exists():
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = int(state["step"])
    ramp.move_to(first)
    for step in range(first, steps):
        x, classes = batch_of(step)
        with gate_losses(model, shared=True) as losses:
            loss = nn.functional.cross_entropy(model(x), classes)
        (loss + 0.01 * losses.balance()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ramp.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": torch.tensor(steps)}, checkpoint_id=folder)
    # One file that `bg.load_pretrained` reads in a single process, to pack and serve.
    bg.save_pretrained(model, folder / "whole")
    model.eval()
    x, classes = batch_of(steps)
    with torch.no_grad(), bg.record_gates(model) as record:
        right = (model(x).argmax(-1) == classes).double().mean()
    record.gather()
    distributed.all_reduce(right, distributed.ReduceOp.SUM)
    if distributed.get_rank() == 0:
        world, gates = distributed.get_world_size(), record.gates.values()
        density = sum(gate.measured_density for gate in gates) / len(gates)
        print(f"steps {first} to {steps} in {world} processes: {right / world:.0%} right, {density:.0%} of blocks open")
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=Path("train_many"))
    main(**vars(parser.parse_args()))
