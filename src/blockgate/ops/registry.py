"""How an op is registered with torch: schema, default kernel, shapes for tracing, gradient.

Each op exists under its own name, where compiled kernels take over the CPU if they were built, and Triton's the GPU if
Triton is installed; and as `<name>_reference`, which always runs the reference. With Triton kernels it exists a third
time, as `<name>_triton`, which runs them or raises. All share everything but the kernel.

To torch.compile each is one op, whatever kernels it launches: its shapes follow from those of its inputs, so graphs
with it are captured whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from blockgate.errors import BackendError, BlockgateError, invalid
from blockgate.ops import gpu

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["define", "differentiate", "forbid_second_derivative", "library", "variant"]

library = torch.library.Library("blockgate", "DEF")
library.define("isa() -> str")
# For tests: makes one of the next requests for native scratch memory fail.
library.define("fail_request(int which) -> int")


# Ops that have Triton kernels.
_on_gpu: set[str] = set()


def define(
    name: str,
    signature: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    triton: str | None = None,
    cpu_only: bool = False,
) -> None:
    """Defines the variants of an op, with the reference `kernel` for every device.

    `triton` is the module whose function `name` launches the Triton kernels; it is imported on first use. `cpu_only`:
    there are kernels for the CPU, and on a GPU it logs once that the slow reference runs.
    """

    def without_autocast(*args: Any) -> Any:
        # Autocast would reach through the op into the reference's own matmuls.
        with torch.autocast(args[0].device.type, enabled=False):
            return kernel(*args)

    def check_devices(args: tuple[Any, ...]) -> None:
        devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
        if len(devices) > 1:
            raise invalid(
                f"blockgate::{name}",
                expected="all tensors on one device",
                got=sorted(map(str, devices)),
                remedy="Move them with .to(device); a layer on the meta device needs its weights first.",
            )

    def checked_fake(*args: Any) -> Any:
        # With one argument on the meta device torch calls this, and would take empty memory for the result.
        check_devices(args)
        return fake(*args)

    def triton_or_error(*args: Any) -> Any:
        check_devices(args)
        device_type = args[0].device.type
        reason = gpu.device_refusal(device_type)
        if reason is None:
            try:
                return gpu.launch(str(triton), name, args)
            except gpu.NotServedError as not_served:
                reason = str(not_served)
        raise BackendError(f"blockgate::{name}, backend 'triton': expected what GPU kernels compute, got: {reason}.")

    def triton_or_reference(*args: Any) -> Any:
        check_devices(args)
        reason = gpu.unavailable_reason()
        if reason is None:
            try:
                return gpu.launch(str(triton), name, args)
            except gpu.NotServedError as not_served:
                reason = str(not_served)
        gpu.log_once(f"{name} runs on the slow reference: {reason}")
        return without_autocast(*args)

    def logged_reference(*args: Any) -> Any:
        check_devices(args)
        gpu.log_once(f"{name} runs on the slow reference: it has kernels for the CPU only")
        return without_autocast(*args)

    kernels = {name: without_autocast, f"{name}_reference": without_autocast}
    if triton is not None:
        _on_gpu.add(name)
        kernels[f"{name}_triton"] = triton_or_error
    for op, default in kernels.items():
        library.define(f"{op}{signature}", tags=torch.Tag.pt2_compliant_tag)
        library.impl(op, default, "CompositeExplicitAutograd")
        torch.library.register_fake(f"blockgate::{op}", checked_fake, lib=library)
    if triton is not None or cpu_only:
        for device_type in gpu.DEVICES:
            library.impl(name, logged_reference if triton is None else triton_or_reference, device_type.upper())


def differentiate(name: str, setup: Callable[..., None], gradient: Callable[..., Any]) -> None:
    """Registers the gradient of every variant; `gradient` is told which backend its own op calls should take."""
    variants = [(name, "auto"), (f"{name}_reference", "reference")]
    if name in _on_gpu:
        variants.append((f"{name}_triton", "triton"))
    for op, backend in variants:

        def backward(ctx: Any, *grads: Any, backend: str = backend) -> Any:
            return gradient(ctx, backend, *grads)

        torch.library.register_autograd(f"blockgate::{op}", backward, setup_context=setup, lib=library)


def forbid_second_derivative(name: str) -> None:
    """Makes differentiating the gradient op `name` a clear error, where torch would return wrong zeros."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def refuse(*_: Any) -> None:
        raise BlockgateError(
            f"blockgate::{name}: expected to be differentiated once, got a second time (create_graph=True or a "
            "gradient penalty). Second derivatives of gated layers are not implemented."
        )

    differentiate(name, setup, refuse)


def variant(name: str, backend: str) -> Any:
    """The op that `backend` means: dispatched by device, the reference, or Triton's where it has one."""
    own = backend == "reference" or (backend == "triton" and name in _on_gpu)
    return getattr(torch.ops.blockgate, f"{name}_{backend}" if own else name)
