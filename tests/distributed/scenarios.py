"""What processes do together, and one process does without them: each scenario returns facts to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import blockgate as bg
from blockgate.errors import BlockgateError
from blockgate.find import is_sharded
from blockgate.gates import BlockReviver, share_means
from blockgate.inspect import gate_losses

STEPS, ACCUMULATED, ROWS, LATER = 6, 2, 12, 3
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Block(nn.Module):
    """Two layers beside which the input passes; computed again for the backward pass if asked."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        """y (rows, 32) for x (rows, 32)."""
        if self.again and self.training:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        """The two layers."""
        return self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    """Sixteen features, two gated blocks, four outputs."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.inputs = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(again) for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """y (rows, 4) for x (rows, 16)."""
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gated(dtype: torch.dtype = torch.float64, *, again: bool = False, seed: int = 1) -> Net:
    """The net with margin gates, whose means are shared."""
    torch.manual_seed(seed)
    net = Net(again).to(dtype)
    bg.sparsify_(net, block_size=8, sparsity=0.5, key_size=None, filter_fn=lambda _, name: "blocks" in name)
    share_means(net)
    return net


def sharded(net: Net, **options: Any) -> Net:
    """The net spread over all processes, block by block."""
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def batches(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(STEPS, ACCUMULATED, ROWS, 16) and (..., 4): this process's rows of what one process alone would see."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, ACCUMULATED, ROWS, 16, generator=random, dtype=torch.float64)
    x = x + 1  # means that are worth counting
    y = torch.stack([x[..., :4].sum(-1), x[..., 4:8].prod(-1), x[..., 8].abs(), x[..., 9]], -1)
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    return x[..., rank::world, :].to(dtype), y[..., rank::world, :].to(dtype)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, ramp: bg.SparsityRamp, steps: range, **how: bool) -> None:
    """Updates with accumulated gradients; `balance` adds that loss, `revive` raises blocks that rest, `half` rounds
    what products read to bfloat16.
    """
    x, y = batches(next(model.parameters()).dtype)
    shared = distributed.is_initialized()
    reviver = BlockReviver(model, patience=1) if how.get("revive") else None
    for step in steps:
        for part in range(ACCUMULATED):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == ACCUMULATED - 1)
            half = torch.autocast("cpu", torch.bfloat16, enabled=how.get("half", False))
            with gate_losses(model, shared=shared) as losses, half:
                loss = nn.functional.mse_loss(model(x[step, part]), y[step, part])
            if how.get("balance"):
                loss = loss + 0.3 * losses.balance() + 0.2 * losses.locality(2)
            (loss / ACCUMULATED).backward()
        optimizer.step()
        if reviver is not None:
            reviver.step(0.05)
        optimizer.zero_grad()
        ramp.step()


def facts(model: nn.Module) -> dict[str, Any]:
    """The whole state in every process, gates and outputs in it, and the record of the whole batch."""
    x, _ = batches(next(model.parameters()).dtype)
    model.eval()
    with torch.no_grad(), bg.record_gates(model) as record:
        model(x[0, 0])
    if distributed.is_initialized():
        record.gather()
    torch.manual_seed(7)
    with torch.no_grad():
        same = model(torch.randn(5, 16, dtype=x.dtype))
    model.train()
    options = states.StateDictOptions(full_state_dict=True)
    counts = {name.removeprefix("module."): (gate.rows, gate.open_counts) for name, gate in record.gates.items()}
    state = {name: value.clone() for name, value in states.get_model_state_dict(model, options=options).items()}
    return {"state": state, "output": same, "counts": counts}


def trained(model: nn.Module, **how: bool) -> dict[str, Any]:
    """Facts after training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ramp = bg.SparsityRamp(model, final=0.75, begin=1, end=4)
    learn(model, optimizer, ramp, range(STEPS), **how)
    return facts(model)


def ddp(_: Path) -> dict[str, Any]:
    """DistributedDataParallel; without processes, the plain net."""
    net = gated()
    return trained(DistributedDataParallel(net) if distributed.is_initialized() else net, balance=True)


def fsdp(_: Path) -> dict[str, Any]:
    """fully_shard with blocks that are computed again."""
    net = gated(again=True)
    return trained(sharded(net) if distributed.is_initialized() else net, balance=True)


def ddp_again(_: Path) -> dict[str, Any]:
    """DistributedDataParallel with blocks that are computed again."""
    net = gated(again=True)
    return trained(DistributedDataParallel(net) if distributed.is_initialized() else net, balance=True)


def revived_ddp(_: Path) -> dict[str, Any]:
    """Blocks that rest are raised."""
    net = gated()
    return trained(DistributedDataParallel(net) if distributed.is_initialized() else net, revive=True)


def revived_fsdp(_: Path) -> dict[str, Any]:
    """Blocks that rest are raised, sharded."""
    net = gated()
    return trained(sharded(net) if distributed.is_initialized() else net, revive=True)


def mixed(_: Path) -> dict[str, Any]:
    """bfloat16 in products, float32 in weights."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(sharded(gated(torch.float32), mp_policy=policy))


def mixed_ddp(_: Path) -> dict[str, Any]:
    """The same under DistributedDataParallel and autocast."""
    return trained(DistributedDataParallel(gated(torch.float32)), half=True)


def saved(folder: Path) -> dict[str, Any]:
    """Half of a training, saved in two ways, and the rest of it."""
    net = gated()
    sharded(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ramp = bg.SparsityRamp(net, final=0.75, begin=1, end=4)
    learn(net, optimizer, ramp, range(LATER))
    model_state, optimizer_state = states.get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "ramp": ramp.state_dict()}
    dcp.save(state, checkpoint_id=folder / "dcp")
    bg.save_pretrained(net, folder / "pretrained")
    half = facts(net)
    learn(net, optimizer, ramp, range(LATER, STEPS))
    return {"half": half, "end": facts(net)}


def loaded(folder: Path) -> dict[str, Any]:
    """What `saved` saved, taken up by any number of processes; the rest of the training."""
    net = gated(seed=2)
    if distributed.is_initialized():
        sharded(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ramp = bg.SparsityRamp(net, final=0.75, begin=1, end=4)
    model_state, optimizer_state = states.get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "ramp": ramp.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    states.set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    ramp.load_state_dict(state["ramp"])
    half = facts(net)
    learn(net, optimizer, ramp, range(LATER, STEPS))
    return {"half": half, "end": facts(net)}


def ddp_state(_: Path) -> dict[str, Any]:
    """A state that one model gives, taken over by another under DistributedDataParallel."""
    one, other = gated(), gated(seed=2)
    bg.set_sparsity(one, 0.75)
    state = states.get_model_state_dict(DistributedDataParallel(one), options=WHOLE)
    wrapped = DistributedDataParallel(other)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(wrapped, state if distributed.get_rank() == 0 else {}, options=options)
    return {"one": facts(one), "other": facts(other)}


def refusals(folder: Path) -> dict[str, str]:
    """What can't be done with shards, and what is said."""
    net = sharded(gated())
    lonely = gated()
    for module in lonely.modules():
        if hasattr(module, "shared"):
            module.shared = False
    fully_shard(lonely)
    x, _ = batches()

    def said(work: Any) -> str:
        try:
            work()
        except BlockgateError as error:
            return str(error)
        return "nothing"

    (folder / "taken").write_text("a file")
    dense = Net()
    fully_shard(dense)
    # After a call in eval mode, the weights of the outermost module stay whole for a while.
    one = fully_shard(gated()).eval()
    with torch.no_grad():
        one(x[0, 0])
        dense(x[0, 0].float())
    assert not any(map(is_sharded, one.parameters()))
    return {
        "pack": said(lambda: bg.pack(net)),
        "pack after a call": said(lambda: bg.pack(one)),
        "load": said(lambda: bg.load_pretrained(folder / "pretrained", net)),
        "load after a call": said(lambda: bg.load_pretrained(folder / "pretrained", one)),
        "sparsify": said(lambda: bg.sparsify_(dense, block_size=8)),
        "write": said(lambda: bg.save_pretrained(net, folder / "taken")),
        "means": said(lambda: lonely(x[0, 0])),
        "again": said(lambda: bg.save_pretrained(net, folder / "pretrained-again")),
    }


@torch.no_grad()
def edited(_: Path) -> dict[str, Any]:
    """Inference before and after weights are edited in place: no copy of them may be kept."""
    found, why = {}, ""
    for name, net in (("sharded", sharded(gated(torch.float32))), ("whole", gated(torch.float32))):
        net.eval()
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
        before = net(x)
        for parameter in net.parameters():
            parameter.mul_(0.5)
        found[name] = (before, net(x))
        if name == "sharded":
            why = net.blocks[0].first.plan(torch.randn(3, 32)).why
    return found | {"why": why}
