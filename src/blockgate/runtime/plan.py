"""How a layer runs now: which path, why not a faster one, and what to do about it.

A layer can run in one native call (gate, selection and product, for an LSTM all layers and steps) when nothing has to
see or change what happens inside. The functions here name whatever stands against that. They run before every small
product: each costs well under a microsecond, and the likely refusals come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from blockgate.ops import native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

__all__ = [
    "FUSED",
    "OPS",
    "PATHS",
    "REFERENCE",
    "STEPS",
    "Plan",
    "Refusal",
    "gate_refusal",
    "input_refusal",
    "memory_refusal",
    "observing_refusal",
    "shadow_refusal",
    "slower_path",
    "watcher_refusal",
    "weights_refusal",
]

# The paths, from the fastest to the slowest.
FUSED = "fused native"
OPS = "separate ops"
STEPS = "step by step"
REFERENCE = "reference"
PATHS = (FUSED, OPS, STEPS, REFERENCE)


class Refusal(NamedTuple):
    """Why a layer can't run in one native call, and what to do about it."""

    why: str
    remedy: str


class Plan(NamedTuple):
    """The path a layer takes; why it is not a faster one and what to do about it, both empty for the fastest."""

    path: str
    why: str = ""
    remedy: str = ""


NO_KERNELS = Refusal("the native kernels are not there", "Run `blockgate info`, which says why.")
GRADIENTS = Refusal("gradients are on", "Right for training. For inference, use torch.inference_mode().")
SUBCLASS = Refusal("the input is a subclass of Tensor", "Pass a plain tensor.")
INPUT_TYPE = Refusal("the input is not float32", "Convert it with .float().")
INPUT_DEVICE = Refusal("the input is not on the CPU", "Kernels for other devices are still missing.")
INPUT_LAYOUT = Refusal("the input is not a dense tensor", "Convert it with .to_dense().")
TRACING = Refusal("the call is compiled or traced", "Compiled code calls the separate ops; nothing to do.")
WATCHED = Refusal("a dispatch mode watches the ops", "Leave the `with` block of the mode.")
AUTOCAST = Refusal("autocast is on", "Packed and gated layers choose their types themselves: leave autocast.")
FORWARD_MODE = Refusal("forward-mode differentiation is on", "Leave the dual level.")
BACKEND = Refusal("backend='reference' was asked for", "Make the layer with backend='auto'.")
GATE_KIND = Refusal("this kind of gate has no native code", "Use gate='topk'.")
GATE_HOOKS = Refusal("the gate has forward hooks, as while gates are recorded", "Remove the hooks.")
GATE_PATCHED = Refusal("the gate's forward or scores was replaced", "Delete the attribute, or register a kind of gate.")
GATE_OBSERVES = Refusal("the gate counts what it sees, as in training", "Call eval() for inference.")
GATE_WEIGHTS = Refusal("the gate is parametrized or pruned", "Make that permanent and remove it.")
WEIGHTS = Refusal("the layer is parametrized or pruned", "Make that permanent and remove it.")
SHADOWED = Refusal("another tensor stands in for a weight", "Weight dropout does that in training: call eval().")
WEIGHT_TYPE = Refusal("parameters are not contiguous float32 on the CPU", "Convert the layer with .float().")
INFERENCE_WEIGHTS = Refusal(
    "parameters were made in inference mode, so changes can't be seen", "Make the model outside of inference_mode()."
)
STATE_TYPE = Refusal("the state is not float32", "Convert h and c with .float().")
LAYER_DROPOUT = Refusal("dropout between layers is active", "Right for training. Otherwise call eval().")
LAYER_HOOKS = Refusal("a matrix of the layer has forward hooks", "Remove the hooks.")


GATE_PARAMETERS = {"weight", "bias", "hidden_weight", "hidden_bias"}


def input_refusal(x: Tensor) -> Refusal | None:
    """What about the input, or about the surroundings of the call, stands against one native call."""
    if type(x) is not Tensor:
        return SUBCLASS
    if x.dtype is not torch.float32:
        return INPUT_TYPE
    if not x.is_cpu:
        return INPUT_DEVICE
    if x.layout is not torch.strided:
        return INPUT_LAYOUT
    # A trace, or a mode that watches ops, would keep the number of a prepared layer, which means nothing later.
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return TRACING
    if torch._C._len_torch_dispatch_stack():
        return WATCHED
    if torch.is_autocast_enabled("cpu"):
        return AUTOCAST
    if forward_ad._current_level >= 0:
        return FORWARD_MODE
    if native.unavailable_reason() is not None:
        return NO_KERNELS
    return None


def gate_refusal(gate: nn.Module) -> Refusal | None:
    """Why native code can't stand in for a gate: it computes something else, or somebody looks on."""
    if not gate._parameters.keys() >= GATE_PARAMETERS:
        return GATE_WEIGHTS
    if not vars(type(gate)).get("native"):
        return GATE_KIND
    if gate._forward_hooks or gate._forward_pre_hooks:
        return GATE_HOOKS
    if "forward" in gate.__dict__ or "scores" in gate.__dict__:
        return GATE_PATCHED
    return BACKEND if gate.backend == "reference" else None


def watcher_refusal(gate: nn.Module) -> Refusal | None:
    """`gate_refusal` where the gate's class, spec and parameters are known to be those of a gate without one."""
    own = gate.__dict__
    watched = own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "scores" in own
    return gate_refusal(gate) if watched else None


def observing_refusal(gate: nn.Module) -> Refusal | None:
    """Whether the gate has to be told of every row: native code wouldn't."""
    return GATE_OBSERVES if gate.training and gate.observes else None


def weights_refusal(layer: nn.Module, names: Iterable[str]) -> Refusal | None:
    """Whether these are ordinary parameters of the layer: parametrized and pruned ones are computed on the way."""
    return None if all(name in layer._parameters for name in names) else WEIGHTS


def shadow_refusal(layer: nn.Module) -> Refusal | None:
    """Whether attributes of the layer stand in for its parameters for the moment."""
    return None if layer._parameters.keys().isdisjoint(layer.__dict__) else SHADOWED


def memory_refusal(parameters: Iterable[Tensor | None]) -> Refusal | None:
    """Whether native code can read these as they are: each None, or contiguous float32 on the CPU."""
    if all(p is None or (p.dtype is torch.float32 and p.is_cpu and p.is_contiguous()) for p in parameters):
        return None
    return WEIGHT_TYPE


def slower_path(refusal: Refusal, x: Tensor, backend: str) -> Plan:
    """The plan of a layer that can't run in one native call: its ops, native where they can be."""
    by_reference = backend == "reference" or not x.is_cpu or native.unavailable_reason() is not None
    return Plan(REFERENCE if by_reference else OPS, *refusal)
