"""Compiles the Triton kernels for GPUs that are not there, and reads what the compilers say about them.

Ops are called with tensors on the meta device, and every launch is compiled with the arguments that it has, for a
target instead of the machine: what is looked at is what a GPU of that kind would run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "Compiled", "compile_launches"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A kernel as compiled for one launch.

    Args:
        kernel: its name.
        target: what it was compiled for, one of TARGETS.
        size: bytes of machine code with its header.
        registers: of a thread.
        spilled: bytes of a thread's registers that its code moves to memory and back; on AMD, registers.
        shared: bytes of shared memory of a program.
        warps: of a program.
        tensor_cores: whether its code has instructions for them.
        float_atomics: whether its code adds floats to memory in an order that may change from run to run.
    """

    kernel: str
    target: str
    size: int
    registers: int
    spilled: int
    shared: int
    warps: int
    tensor_cores: bool
    float_atomics: bool

    @property
    def programs_at_once(self) -> int:
        """How many programs fit an sm_80 or sm_90 multiprocessor: 64 warps, 65,536 registers, 163 or 227 KB."""
        a_warp = -(-self.registers * 32 // 256) * 256
        memory = (163 if self.target == "sm_80" else 227) * 1024
        by_memory = memory // (self.shared + 1024)
        return min(64 // self.warps, 65536 // max(1, a_warp * self.warps), by_memory, 32)

    @property
    def occupancy(self) -> float:
        """Share of the 64 warps of a multiprocessor that run."""
        return self.programs_at_once * self.warps / 64


class _Absent:
    """Stands in for the driver of a GPU that is not there: enough to compile for it."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # Kernels keep what they compiled by device.
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: str) -> int:  # noqa: ARG002
        return 0

    def get_benchmarker(self) -> Callable[..., tuple[float, ...]]:
        """Compiles what a GPU would time, and finds all of it equally fast."""

        def benchmark(call: Callable[[], object], quantiles: tuple[float, ...]) -> tuple[float, ...]:
            call()
            return (0.0,) * len(quantiles)

        return benchmark


def compile_launches(call: Callable[[], object], target: str) -> list[Compiled]:
    """Compiles whatever `call` would launch, for a target; its tensors should be on the meta device."""
    launched: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launched.setdefault(id(kernel), kernel)

    before = driver._active if hasattr(driver, "_active") else None
    driver.set_active(_Absent(TARGETS[target]))
    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = run
        driver._active = before
    return [_facts(kernel, target) for kernel in launched.values()]


def _facts(kernel: Any, target: str) -> Compiled:
    if target.startswith("gfx"):
        text, code = kernel.asm["amdgcn"], kernel.asm["hsaco"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spilled, cores = _number(r"\.vgpr_spill_count:\s+(\d+)", text), "v_mfma_" in text
        atomics = r"atomic_(pk_)?add_(f|bf)\d"
    else:
        code, text = kernel.asm["cubin"], kernel.asm["ptx"]
        usage = _cuobjdump(code, "--dump-resource-usage")
        registers = _number(r"REG:(\d+)", usage)
        spilled = _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
        # A frame that no instruction writes holds nothing.
        if spilled and not re.search(r"\bSTL\b", _cuobjdump(code, "--dump-sass")):
            spilled = 0
        atomics = r"\b(atom|red)\.\S*\.(bf|f)\d"
        cores = re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", text) is not None
    return Compiled(
        kernel=kernel.metadata.name,
        target=target,
        size=len(code),
        registers=registers,
        spilled=spilled,
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        tensor_cores=cores,
        float_atomics=re.search(atomics, text) is not None,
    )


def _cuobjdump(cubin: bytes, what: str) -> str:
    """What `cuobjdump`, which comes with Triton, says about a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(tool), what, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's output has nothing like {pattern!r}")
    return int(found[1])
