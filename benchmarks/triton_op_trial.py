"""What `torch.library.triton_op` would do for the kernels here, tried on two of them: no GPU needed.

    python benchmarks/triton_op_trial.py

writes `results/gpu-triton-op.md`. docs/gpu.md says what follows from it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.library import opcheck, triton_op, wrap_triton
from triton.runtime.driver import driver

from blockgate.grid import BlockGrid
from blockgate.lab.bench.gpu_kernels import TARGETS, _Absent
from blockgate.ops.forget_pool import reference
from blockgate.ops.forget_pool import triton as pool
from blockgate.ops.gated_linear import triton_cut, triton_rows
from tests.triton.fake_cuda import fake_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

RESULT = Path(__file__).parent / "results" / "gpu-triton-op.md"
OUT, IN, BLOCK = 768, 3072, (256, 16)
ENTRIES = (576, 500, 432, 400, 350, 288, 200, 144, 100, 57)


@triton_op("blockgate_trial::pool", mutates_args=())
def pooled(candidate: Tensor, forget: Tensor, first: Tensor) -> Tensor:
    """The kernel of the pooling."""
    states, size = torch.empty_like(candidate), first.numel()
    programs = (triton.cdiv(size, 128),)
    wrap_triton(pool._forward)[programs](candidate, forget, first, states, len(candidate), size, FEATURES=128)
    return states


@triton_op("blockgate_trial::few_rows", mutates_args=())
def few_rows(x: Tensor, weight: Tensor, gates: Tensor, indices: Tensor) -> Tensor:
    """The kernels of the product of few rows, cut as they are."""
    grid = BlockGrid(OUT, IN, BLOCK)
    rows, entries = gates.shape
    cut, y = triton_cut.few_rows(rows, entries, grid, 4), x.new_empty(rows, OUT)
    sums = y if cut.splits == 1 else y.new_empty(cut.splits, rows, OUT)
    tensors = (x, weight, weight, y, gates, indices, sums)
    sizes = (entries, cut.splits, OUT, IN, *BLOCK, grid.in_blocks, grid.num_blocks, 0, *x.stride(), *weight.stride())
    constants = {"FORMAT": 0, "HAS_BIAS": False, "BLOCK_IN": cut.width, "AT_ONCE": cut.at_once, "OUTPUTS": cut.outputs}
    programs = (rows, grid.out_blocks, -(-BLOCK[0] // cut.outputs) * cut.splits)
    wrap_triton(triton_rows.rows_forward)[programs](*tensors, *sizes, **constants, SCAN=1024)
    if cut.splits > 1:
        wrap_triton(triton_rows.add_parts)[(triton.cdiv(y.numel(), 256),)](sums, y, y.numel(), cut.splits, SIZE=256)
    return y


def outcome(call: Callable[[], Any]) -> str:
    """What a call gives, or the end of its error's first line."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"


def interpreted() -> None:
    """The op of the pooling in the interpreter, called, compiled and checked."""
    given = (torch.randn(5, 2, 33), torch.rand(5, 2, 33), torch.randn(2, 33))
    want = reference.forget_pool(*given)
    compiled = torch.compile(pooled, backend="aot_eager", fullgraph=True)
    print(f"| called | off by {outcome(lambda: (pooled(*given) - want).abs().max().item())} |")
    print(f"| compiled (aot_eager) | {outcome(lambda: (compiled(*given) - want).abs().max().item())} |")
    print(f"| `opcheck` | {outcome(lambda: opcheck(torch.ops.blockgate_trial.pool.default, given))} |")


def graphs_of_a_ramp(product: Callable[..., Tensor]) -> int:
    """How many graphs a compiled product has after a ramp, on CUDA tensors without data."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(lambda *given: product(*given) * 2, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    for entries in ENTRIES:
        x, weight, gates = (torch.empty(shape, device="cuda") for shape in ((1, IN), (OUT, IN), (1, entries)))
        compiled(x, weight, gates, torch.empty(1, entries, device="cuda", dtype=torch.int64))
    return len(graphs)


def main() -> None:
    """Writes the page; the interpreter has a process of its own."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreted()
        return
    command, environment = [sys.executable, __file__], os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    driver.set_active(_Absent(TARGETS["sm_80"]))
    with fake_cuda():
        by_launch = graphs_of_a_ramp(few_rows)
        by_op = graphs_of_a_ramp(lambda x, w, g, i: torch.ops.blockgate.gated_linear(x, w, None, g, i, [*BLOCK]))
    text = f"""# Kernels behind torch.library.triton_op

Written by `benchmarks/triton_op_trial.py` with torch {torch.__version__} and Triton {triton.__version__}.

## Pooling in the interpreter

| use | what happened |
|---|---|
{found}
## Graphs of a ramp

Graphs that `torch.compile` made of one row of a layer of {OUT} x {IN}, for {len(ENTRIES)} numbers of open blocks:

| op | graphs |
|---|--:|
| custom op, as it is | {by_op} |
| `triton_op` | {by_launch} |
"""
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
