"""GPU tensors without a GPU: shapes, types and devices only, for looking at what is dispatched where."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA, META = 1, 14
DEVICE_TYPES = 22


@contextmanager
def fake_cuda():
    """A mode in which tensors can be made on "cuda", without gradients, which abort a CPU build of torch."""
    _guard_devices()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def on_fake_cuda(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on "cuda"; to be called inside `fake_cuda`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                module._parameters[name] = nn.Parameter(there, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    return model


def runs_on_cuda(op: str) -> bool:
    """Whether an op has a kernel of its own for CUDA."""
    return has_kernel(f"blockgate::{op}", "CUDA")


def _guard_devices() -> None:
    """Gives a CPU build of torch what switches between GPUs: that of meta tensors, which does nothing.

    Slicing needs it. torch does the same where it was built for CUDA and finds no card.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert guards[META], "torch numbers its device types in another way"
    guards[CUDA] = guards[META]
