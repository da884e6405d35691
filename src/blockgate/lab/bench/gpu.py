"""One gated layer on a GPU against torch's dense layer of the same type, in turns, timed by the device's own events."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockgate.lab.bench.checks import by_reference, require_close
from blockgate.lab.bench.linear import INPUTS, LinearCase, dynamic_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockgate.layers import DynamicSparseLinear

__all__ = ["TYPES", "GPUResult", "gpu_markdown", "medians_on", "run_on"]

# Bytes that are written before a cold call: more than the second-level cache of any GPU of today.
EVICTED = 256 << 20
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUResult:
    """Median seconds of a call by the name of the arm, e.g. "dense bf16" and "blockgate bf16 75%"."""

    title: str
    case: dict[str, Any]
    training: bool
    device: str
    seconds: dict[str, float]

    def speedup(self, name: str) -> float:
        """How many times faster than the dense layer of the same type."""
        return self.seconds[f"dense {name.split()[1]}"] / self.seconds[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        arms = [{"name": name, "median": s, "speedup": self.speedup(name)} for name, s in self.seconds.items()]
        case = self.case | {"dtypes": list(TYPES), "title": self.title}
        return {"case": case, "training": self.training, "device": self.device, "arms": arms}


def run_on(case: LinearCase, device: str, *, training: bool, seconds: float) -> GPUResult:
    """Builds all arms of a layer on `device`, checks ours against the reference, and times them in turns."""
    torch.manual_seed(0)
    calls = {}
    for short, dtype in TYPES.items():
        inputs = [torch.randn(case.batch, case.in_features, device=device, dtype=dtype) for _ in range(INPUTS)]
        dense = nn.Linear(case.in_features, case.out_features, device=device, dtype=dtype)
        calls[f"dense {short}"] = _call(dense, inputs, training)
        for sparsity in case.sparsities:
            layer = dynamic_layer(case, sparsity).to(device)
            with torch.no_grad():
                want = by_reference(layer)(inputs[0].float())
                require_close(layer(inputs[0].float()), want, f"{sparsity:.0%}")
            layer = layer.to(dtype)
            calls[f"blockgate {short} {sparsity:.0%}"] = _call(layer, inputs, training)
            if not training and grouped_fits(layer):
                grouped = GroupedLinear(layer)
                with torch.no_grad():
                    require_close(grouped(inputs[0]).float(), want, f"torch's grouped product, {sparsity:.0%}")
                calls[f"grouped {short} {sparsity:.0%}"] = _call(grouped, inputs, training)
    return GPUResult(
        title=case.title,
        case=asdict(case),
        training=training,
        device=_name(device),
        seconds=medians_on(calls, device, seconds=seconds, cold=case.cold),
    )


def medians_on(calls: Mapping[str, Callable[[], Any]], device: str, *, seconds: float, cold: bool) -> dict[str, float]:
    """Median seconds of each call, which take turns; `cold` writes over the caches before each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles
        call()
    eviction = torch.empty(EVICTED if cold else 0, dtype=torch.int8, device=device)
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or any(len(taken) < 5 for taken in times.values()):
        for name, call in calls.items():
            eviction.zero_()
            times[name].append(_seconds(call, device))
    return {arm: statistics.median(values) for arm, values in times.items()}


def gpu_markdown(result: GPUResult) -> str:
    """The table of one case."""
    what = "forward and backward" if result.training else "forward"
    lines = [f"## {result.title}, {what}, {result.device}", "", "| arm | median us | speed-up |", "|---|--:|--:|"]
    lines += [f"| {name} | {s * 1e6:.1f} | {result.speedup(name):.2f}x |" for name, s in result.seconds.items()]
    return "\n".join([*lines, "", ""])


def grouped_fits(layer: DynamicSparseLinear) -> bool:
    """Whether torch's grouped product computes such blocks: all whole, and 16 bytes wide or a multiple of it."""
    grid, size = layer.grid, layer.weight.element_size()
    whole = grid.out_features % grid.block[0] == 0 and grid.in_features % grid.block[1] == 0
    return hasattr(nn.functional, "grouped_mm") and whole and all(side * size % 16 == 0 for side in grid.block)


class GroupedLinear(nn.Module):
    """A gated layer as one would write it with torch's own ops: pairs sorted by block, one grouped product, a sum.

    Args:
        layer: the layer, whose gate it calls.
    """

    def __init__(self, layer: DynamicSparseLinear) -> None:
        super().__init__()
        self.layer = layer
        grid = layer.grid
        cut = layer.weight.detach().view(grid.out_blocks, grid.block[0], grid.in_blocks, grid.block[1])
        # (blocks, in, out)
        self.blocks = cut.permute(0, 2, 3, 1).flatten(0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """y (N, out_features) for x (N, in_features)."""
        grid, layer = self.layer.grid, self.layer
        gates, indices = layer.gate.decide(x, layer.weight)
        order = indices.flatten().argsort(stable=True)
        block, row = indices.flatten()[order], order // indices.shape[1]
        ends = torch.bincount(block, minlength=grid.num_blocks).cumsum(0).to(torch.int32)
        inputs = x.unflatten(1, (grid.in_blocks, grid.block[1]))[row, block % grid.in_blocks]
        products = nn.functional.grouped_mm(inputs, self.blocks, offs=ends)
        y = torch.zeros(len(x) * grid.out_blocks, grid.block[0], device=x.device)
        y.index_add_(0, row * grid.out_blocks + block // grid.in_blocks, gates.flatten()[order, None] * products)
        y = y.view(len(x), grid.out_features)
        return (y if layer.bias is None else y + layer.bias).to(x.dtype)


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _call(layer: nn.Module, inputs: list[Tensor], training: bool) -> Callable[[], None]:
    """A call with the next input: a training step, or inference."""
    turn = 0
    layer.train(training)

    def step() -> None:
        nonlocal turn
        turn += 1
        x = inputs[turn % len(inputs)]
        with torch.set_grad_enabled(training):
            if training:
                x = x.detach().requires_grad_()
                layer.zero_grad()
                layer(x).sum().backward()
            else:
                layer(x)

    return step


def _seconds(call: Callable[[], None], device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1000
