"""One linear layer: dense torch, ours, and the static kinds of sparsity, checked for correctness, then timed."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.inspect.timing import Timing, in_turn, interleave
from blockgate.lab.bench.checks import (
    SHORT_NAMES,
    by_reference,
    open_gates,
    packed_dense_name,
    relative_error,
    require_close,
    require_density,
)
from blockgate.lab.bench.comparison import Arm
from blockgate.lab.bench.engines import torch_int8
from blockgate.lab.bench.machine import read_bandwidth
from blockgate.layers import DynamicSparseLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockgate.runtime import PackedDynamicSparseLinear

__all__ = ["DENSE", "LinearArm", "LinearCase", "LinearResult", "dynamic_layer", "run_linear"]

DENSE = "torch fp32"

# Different inputs that an arm meets in turn.
INPUTS = 16

# Largest relative error against float32 that a packed type may have and still be timed.
PACKED_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.int8: 0.02}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCase:
    """What is measured: one layer at one batch size."""

    out_features: int
    in_features: int
    batch: int = 1
    block: int | tuple[int, int] = 128
    key: int = 128
    gate: str = "topk"
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.75, 0.9)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.int8)
    select: str = "global"
    static: bool = True
    cold: bool = False
    cpu_time: bool = False

    @property
    def title(self) -> str:
        """For tables and progress bars."""
        cache = (", evicted cache" if self.cold else "") + (", processor time" if self.cpu_time else "")
        block = self.block if isinstance(self.block, int) else "x".join(map(str, self.block))
        gate = "" if self.gate == "topk" else f", gate {self.gate}"
        return (
            f"{self.out_features}x{self.in_features}, batch {self.batch}, block {block}, key {self.key}{gate}, "
            f"{torch.get_num_threads()} threads{cache}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearArm(Arm):
    """One way to compute the layer.

    Args:
        sparsity: share of blocks, or of weights, that are closed.
        density: share that is open, as measured.
        weight_bytes: what a row of input reads of the weights; 0 if that is not known.
        error: relative error against the reference.
        changed_gates: share of gates that rounding opens or closes.
    """

    sparsity: float = 0.0
    density: float = 1.0
    weight_bytes: int = 0
    error: float = 0.0
    changed_gates: float = 0.0


@dataclass(kw_only=True, slots=True)
class LinearResult:
    """All arms of a case with their times, and the roofs measured beside them."""

    case: LinearCase
    arms: list[LinearArm]
    timings: dict[str, Timing]
    left_out: dict[str, str] = field(default_factory=dict)
    bandwidth: float = 0.0

    def speedup(self, arm: LinearArm) -> float:
        """How many times faster than dense torch, by medians."""
        return self.timings[DENSE].median / self.timings[arm.name].median

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        case = asdict(self.case) | {"dtypes": [SHORT_NAMES[d] for d in self.case.dtypes], "title": self.case.title}
        arms = [
            {
                "name": arm.name,
                "sparsity": arm.sparsity,
                "measured_density": arm.density,
                "weight_bytes": arm.weight_bytes,
                "relative_error": arm.error,
                "changed_gates": arm.changed_gates,
                "speedup": self.speedup(arm),
                **asdict(self.timings[arm.name]),
            }
            for arm in self.arms
        ]
        return {"case": case, "arms": arms, "left_out": self.left_out, "read_bytes_per_second": self.bandwidth}


def dynamic_layer(case: LinearCase, sparsity: float) -> DynamicSparseLinear:
    """A random layer that opens exactly the asked blocks: margins do, and other scores are made positive."""
    layer = DynamicSparseLinear(
        case.in_features,
        case.out_features,
        block_size=case.block,
        key_size=min(case.key, case.in_features),
        sparsity=sparsity,
        gate=case.gate,
        normalise=None if case.gate == "margin" else "mean",
        select=case.select,
    )
    if case.gate != "margin":
        open_gates(layer)
    return layer.eval()


@torch.no_grad()
def run_linear(case: LinearCase, *, seconds: float, progress: Callable[[], None] = lambda: None) -> LinearResult:
    """Builds, checks and times all arms of a case."""
    torch.manual_seed(0)
    inputs = [torch.randn(case.batch, case.in_features) for _ in range(INPUTS)]
    dense = nn.Linear(case.in_features, case.out_features).eval()
    arms = [LinearArm(name=DENSE, call=in_turn(inputs, dense), weight_bytes=dense.weight.numel() * 4)]
    left_out: dict[str, str] = {}
    arms += _packed_dense_arms(case, dense, inputs)
    for sparsity in case.sparsities:
        arms += _dynamic_arms(case, sparsity, inputs)
    if case.static:
        for name, sparsity, build in _static_builders(case, dense):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    arms.append(_static_arm(name, sparsity, build(), inputs))
            except (RuntimeError, NotImplementedError, AttributeError, ImportError) as error:
                left_out[name] = str(error).splitlines()[0]
    timings = interleave({arm.name: arm.call for arm in arms}, seconds=seconds, cold=case.cold, progress=progress)
    bandwidth = read_bandwidth(arms[0].weight_bytes)
    return LinearResult(case=case, arms=arms, timings=timings, left_out=left_out, bandwidth=bandwidth)


def _packed_dense_arms(case: LinearCase, dense: nn.Linear, inputs: list[Tensor]) -> list[LinearArm]:
    """The dense layer packed by blockgate: what of the gain has nothing to do with gates."""
    want, arms = dense(inputs[0]), []
    for dtype in case.dtypes:
        packed, name = pack(dense, dtype), packed_dense_name(dtype)
        got = packed(inputs[0])
        require_close(got, want, name, PACKED_ERROR[dtype])
        size = dense.weight.numel() * torch.empty((), dtype=dtype).element_size()
        error = relative_error(got, want)
        arms.append(LinearArm(name=name, call=in_turn(inputs, packed), weight_bytes=size, error=error))
    return arms


def _dynamic_arms(case: LinearCase, sparsity: float, inputs: list[Tensor]) -> list[LinearArm]:
    """Ours, in every packed type, each checked against the reference before it may be timed."""
    layer, x = dynamic_layer(case, sparsity), inputs[0]
    opened = layer.gates(x) != 0
    density = require_density(opened, layer.gate, f"the layer of sparsity {sparsity}")
    want = by_reference(layer)(x)
    arms = []
    for dtype in case.dtypes:
        packed = layer if dtype == torch.float32 else cast("PackedDynamicSparseLinear", pack(layer, dtype))
        got, name = packed(x), f"blockgate {SHORT_NAMES[dtype]} {sparsity:.0%}"
        require_close(got, want, name, PACKED_ERROR[dtype])
        size = torch.empty((), dtype=dtype).element_size()
        open_bytes = int(density * case.out_features * case.in_features * size) + layer.gate.weight.numel() * 4
        arms.append(
            LinearArm(
                name=name,
                call=in_turn(inputs, packed),
                sparsity=sparsity,
                density=density,
                weight_bytes=open_bytes,
                error=relative_error(got, want),
                changed_gates=((packed.gates(x) != 0) != opened).float().mean().item(),
            )
        )
    return arms


def _static_builders(case: LinearCase, dense: nn.Linear) -> list[tuple[str, float, Callable[[], nn.Module]]]:
    """Static sparsity with torch's own kernels, and torch's int8: name, sparsity, how to build the module."""
    builders: list[tuple[str, float, Callable[[], nn.Module]]] = []
    for sparsity in case.sparsities:
        if sparsity:
            builders += [
                (f"torch CSR {sparsity:.0%}", sparsity, lambda s=sparsity: _csr(dense, s)),  # type: ignore[misc]
                (f"torch BSR {sparsity:.0%}", sparsity, lambda s=sparsity: _bsr(dense, s, case.block)),  # type: ignore[misc]
            ]
    return [*builders, ("torch int8 dynamic", 0.0, lambda: torch_int8(nn.Sequential(dense)))]


class _SparseWeight(nn.Module):
    """y = x W^T + b with a sparse W."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias[:, None], self.weight, x.T).T


def _csr(dense: nn.Linear, sparsity: float) -> nn.Module:
    keep = torch.rand_like(dense.weight) >= sparsity
    return _SparseWeight((dense.weight.detach() * keep).to_sparse_csr(), dense.bias.detach())


def _bsr(dense: nn.Linear, sparsity: float, block: int | tuple[int, int]) -> nn.Module:
    if not isinstance(block, int):
        raise NotImplementedError("compared for square blocks")
    rows, columns = dense.out_features // block, dense.in_features // block
    if rows * block != dense.out_features or columns * block != dense.in_features:
        raise NotImplementedError("torch's BSR needs sizes that blocks divide")
    keep = (torch.rand(rows, columns) >= sparsity).repeat_interleave(block, 0).repeat_interleave(block, 1)
    return _SparseWeight((dense.weight.detach() * keep).to_sparse_bsr(block), dense.bias.detach())


def _static_arm(name: str, sparsity: float, module: nn.Module, inputs: list[Tensor]) -> LinearArm:
    module(inputs[0])
    return LinearArm(name=name, call=in_turn(inputs, module), sparsity=sparsity, density=1 - sparsity)
