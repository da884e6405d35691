"""How an op is registered with torch: schema, default kernel, shapes for tracing, gradient.

Each op exists twice: under its own name, where compiled kernels take over the CPU if they were built, and as
`<name>_reference`, which always runs the reference. Both share everything but the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from blockgate.errors import BlockgateError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["define", "differentiate", "forbid_second_derivative", "library", "variant"]

library = torch.library.Library("blockgate", "DEF")
library.define("isa() -> str")


def define(name: str, signature: str, *, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines both variants of an op, with the reference `kernel` for every device."""

    def without_autocast(*args: Any) -> Any:
        # Autocast would reach through the op into the reference's own matmuls.
        with torch.autocast(args[0].device.type, enabled=False):
            return kernel(*args)

    def checked_fake(*args: Any) -> Any:
        # With one argument on the meta device torch calls this, and would take empty memory for the result.
        devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
        if len(devices) > 1:
            raise invalid(
                f"blockgate::{name}",
                expected="all tensors on one device",
                got=sorted(map(str, devices)),
                remedy="Move them with .to(device); a layer on the meta device needs its weights first.",
            )
        return fake(*args)

    for op in (name, f"{name}_reference"):
        library.define(f"{op}{signature}", tags=torch.Tag.pt2_compliant_tag)
        library.impl(op, without_autocast, "CompositeExplicitAutograd")
        torch.library.register_fake(f"blockgate::{op}", checked_fake, lib=library)


def differentiate(name: str, setup: Callable[..., None], gradient: Callable[..., Any]) -> None:
    """Registers the gradient of both variants; `gradient` is told which backend its own op calls should take."""
    for op, backend in ((name, "auto"), (f"{name}_reference", "reference")):

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
    """The op that `backend` means: dispatched by device, or the reference."""
    return getattr(torch.ops.blockgate, f"{name}_reference" if backend == "reference" else name)
