"""One linear layer: dense torch, ours, and the static kinds of sparsity, checked for correctness, then timed."""

from __future__ import annotations

import copy
import itertools
import warnings
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.errors import BlockgateError
from blockgate.lab.bench.machine import read_bandwidth
from blockgate.lab.bench.timing import Timing, interleave
from blockgate.layers import DynamicSparseLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockgate.runtime import PackedDynamicSparseLinear

__all__ = ["DENSE", "Arm", "LinearCase", "LinearResult", "dynamic_layer", "run_linear"]

DENSE = "torch fp32"

# Different inputs that an arm meets in turn.
INPUTS = 16

# Largest relative error against float32 that a packed type may have and still be timed.
PACKED_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.int8: 0.02}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCase:
    """What is measured: one layer at one batch size."""

    out_features: int
    in_features: int
    batch: int = 1
    block: int = 128
    key: int = 128
    sparsities: tuple[float, ...] = (0.0, 0.5, 0.75, 0.9)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.int8)
    select: str = "global"
    static: bool = True
    cold: bool = False

    @property
    def title(self) -> str:
        """For tables and progress bars."""
        cache = ", evicted cache" if self.cold else ""
        return (
            f"{self.out_features}x{self.in_features}, batch {self.batch}, block {self.block}, key {self.key}, "
            f"{torch.get_num_threads()} threads{cache}"
        )


@dataclass(kw_only=True, slots=True)
class Arm:
    """One way to compute the layer."""

    name: str
    call: Callable[[], Tensor]
    sparsity: float = 0.0
    density: float = 1.0
    weight_bytes: int = 0
    error: float = 0.0
    changed_gates: float = 0.0
    timing: Timing | None = None


@dataclass(kw_only=True, slots=True)
class LinearResult:
    """All arms of a case with their times, and the roofs measured beside them."""

    case: LinearCase
    arms: list[Arm]
    left_out: dict[str, str] = field(default_factory=dict)
    bandwidth: float = 0.0

    def speedup(self, arm: Arm) -> float:
        """How many times faster than dense torch, by medians."""
        dense = next(a for a in self.arms if a.name == DENSE)
        assert dense.timing is not None
        assert arm.timing is not None
        return dense.timing.median / arm.timing.median

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        case = asdict(self.case) | {"dtypes": [SHORT[d] for d in self.case.dtypes], "title": self.case.title}
        arms = [
            {
                "name": arm.name,
                "sparsity": arm.sparsity,
                "measured_density": arm.density,
                "weight_bytes": arm.weight_bytes,
                "relative_error": arm.error,
                "changed_gates": arm.changed_gates,
                "speedup": self.speedup(arm),
                **({} if arm.timing is None else asdict(arm.timing)),
            }
            for arm in self.arms
        ]
        return {"case": case, "arms": arms, "left_out": self.left_out, "read_bytes_per_second": self.bandwidth}


def dynamic_layer(case: LinearCase, sparsity: float) -> DynamicSparseLinear:
    """A random layer whose scores are all positive, so that exactly the asked blocks open."""
    layer = DynamicSparseLinear(
        case.in_features,
        case.out_features,
        block_size=case.block,
        key_size=min(case.key, case.in_features),
        sparsity=sparsity,
        normalise="mean",
        select=case.select,
    )
    nn.init.constant_(layer.gate.bias, 5.0)
    return layer.eval()


@torch.no_grad()
def run_linear(case: LinearCase, *, seconds: float, progress: Callable[[], None] = lambda: None) -> LinearResult:
    """Builds, checks and times all arms of a case."""
    torch.manual_seed(0)
    inputs = [torch.randn(case.batch, case.in_features) for _ in range(INPUTS)]
    dense = nn.Linear(case.in_features, case.out_features).eval()
    arms = [Arm(name=DENSE, call=_over_inputs(dense, inputs), weight_bytes=dense.weight.numel() * 4)]
    left_out: dict[str, str] = {}
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
    for arm in arms:
        arm.timing = timings[arm.name]
    return LinearResult(case=case, arms=arms, left_out=left_out, bandwidth=read_bandwidth(arms[0].weight_bytes))


def _over_inputs(module: nn.Module, inputs: list[Tensor]) -> Callable[[], Tensor]:
    """A call that takes the next input each time: the same one again would find its blocks in the cache."""
    turn = itertools.cycle(inputs)
    return lambda: cast("Tensor", module(next(turn)))


def _dynamic_arms(case: LinearCase, sparsity: float, inputs: list[Tensor]) -> list[Arm]:
    """Ours, in every packed type, each checked against the reference before it may be timed."""
    layer, x = dynamic_layer(case, sparsity), inputs[0]
    opened = layer.gates(x) != 0
    density = opened.float().mean().item()
    _require(abs(density - layer.gate.target_density) < 1e-6, f"measured density {density} at sparsity {sparsity}")
    want = _reference_output(layer, x)
    arms = []
    for dtype in case.dtypes:
        packed = layer if dtype == torch.float32 else cast("PackedDynamicSparseLinear", pack(layer, dtype))
        error = ((packed(x) - want).norm() / want.norm()).item()
        _require(error < PACKED_ERROR[dtype], f"{SHORT[dtype]} differs by {error:.2g} from the reference")
        size = torch.empty((), dtype=dtype).element_size()
        open_bytes = int(density * case.out_features * case.in_features * size) + layer.gate.weight.numel() * 4
        arms.append(
            Arm(
                name=f"blockgate {SHORT[dtype]} {sparsity:.0%}",
                call=_over_inputs(packed, inputs),
                sparsity=sparsity,
                density=density,
                weight_bytes=open_bytes,
                error=error,
                changed_gates=((packed.gates(x) != 0) != opened).float().mean().item(),
            )
        )
    return arms


def _reference_output(layer: DynamicSparseLinear, x: Tensor) -> Tensor:
    judge = copy.deepcopy(layer)
    judge.gate.spec = replace(judge.gate.spec, backend="reference")
    return judge(x)  # type: ignore[no-any-return]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BlockgateError(f"bench: expected a correct result before timing it, got: {what}. No speed is reported.")


def _static_builders(case: LinearCase, dense: nn.Linear) -> list[tuple[str, float, Callable[[], nn.Module]]]:
    """Static sparsity with torch's own kernels, and torch's int8: name, sparsity, how to build the module."""
    builders: list[tuple[str, float, Callable[[], nn.Module]]] = []
    for sparsity in case.sparsities:
        if sparsity:
            builders += [
                (f"torch CSR {sparsity:.0%}", sparsity, lambda s=sparsity: _csr(dense, s)),  # type: ignore[misc]
                (f"torch BSR {sparsity:.0%}", sparsity, lambda s=sparsity: _bsr(dense, s, case.block)),  # type: ignore[misc]
            ]
    return [*builders, ("torch int8 dynamic", 0.0, lambda: _int8(dense))]


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


def _bsr(dense: nn.Linear, sparsity: float, block: int) -> nn.Module:
    rows, columns = dense.out_features // block, dense.in_features // block
    if rows * block != dense.out_features or columns * block != dense.in_features:
        raise NotImplementedError("torch's BSR needs sizes that blocks divide")
    keep = (torch.rand(rows, columns) >= sparsity).repeat_interleave(block, 0).repeat_interleave(block, 1)
    return _SparseWeight((dense.weight.detach() * keep).to_sparse_bsr(block), dense.bias.detach())


def _int8(dense: nn.Linear) -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(nn.Sequential(copy.deepcopy(dense)), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def _static_arm(name: str, sparsity: float, module: nn.Module, inputs: list[Tensor]) -> Arm:
    module(inputs[0])
    return Arm(name=name, call=_over_inputs(module, inputs), sparsity=sparsity, density=1 - sparsity)
