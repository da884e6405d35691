"""How a layer runs now: which path, why not a faster one, and what to do about it.

A layer can run in one native call (gate, selection and product, for an LSTM all layers and steps) when nothing has to
see or change what happens inside. The functions here name whatever stands against that. They run before every small
product: each costs well under a microsecond, and the likely refusals come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from blockgate.ops import gpu, native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from blockgate.gates import Gate

__all__ = [
    "FUSED",
    "OPS",
    "PATHS",
    "REFERENCE",
    "STEPS",
    "Plan",
    "Refusal",
    "gate_refusal",
    "gpu_refusal",
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
    """The path a layer takes; why it is not a faster one and what to do about it, both empty for the fastest.

    `figures` tells what native calls like this one have taken so far, and which way of several they chose.
    """

    path: str
    why: str = ""
    remedy: str = ""
    figures: str = ""


NO_KERNELS = Refusal("the native kernels are not there", "Run `blockgate info`, which says why.")
GRADIENTS = Refusal("gradients are on", "Right for training. For inference, use torch.inference_mode().")
SUBCLASS = Refusal("the input is a subclass of Tensor", "Pass a plain tensor.")
INPUT_TYPE = Refusal("the input is not float32", "Convert it with .float().")
INPUT_DEVICE = Refusal("the input is not on the CPU", "Other devices run the separate ops; nothing to do.")
GPU_TYPE = Refusal("GPU kernels compute with float32, float16 and bfloat16", "Convert the model with .float().")
GPU_FORMAT = Refusal("no GPU kernel reads this packed format", f"Pack to one of {', '.join(gpu.FORMATS)}.")
GPU_GROUP = Refusal(
    f"GPU kernels select from at most {gpu.LARGEST_GROUP} scores at once", 'Use larger blocks, or select="per_row".'
)
INPUT_LAYOUT = Refusal("the input is not a dense tensor", "Convert it with .to_dense().")
TRACING = Refusal("the call is compiled or traced", "Compiled code calls the separate ops; nothing to do.")
WATCHED = Refusal("a dispatch mode watches the ops", "Leave the `with` block of the mode.")
AUTOCAST = Refusal("autocast is on", "Packed and gated layers choose their types themselves: leave autocast.")
FORWARD_MODE = Refusal("forward-mode differentiation is on", "Leave the dual level.")
BACKEND = Refusal("backend='reference' was asked for", "Make the layer with backend='auto'.")
TRITON = Refusal("backend='triton' was asked for", "Triton's kernels run op by op. backend='auto' takes what fits.")
GATE_KIND = Refusal("this kind of gate has no native code", "Use gate='topk'.")
NORM_COLUMNS = Refusal("unpacked norm gates have no native code", "Pack the model with bg.pack for inference.")
NORM_BLOCKS = Refusal(
    "norm gates have native code for blocks of one column only", "Use block_size=(out, 1), and bg.pack for inference."
)
GATE_HOOKS = Refusal("the gate has forward hooks, as while gates are recorded", "Remove the hooks.")
GATE_PATCHED = Refusal("a method of the gate was replaced", "Delete the attribute, or register a kind of gate.")
GATE_OBSERVES = Refusal("the gate counts what it sees, as in training", "Call eval() for inference.")
SHARDED = Refusal(
    "fully_shard hands out whole weights for one call only",
    "For inference: save_pretrained in every process, load_pretrained in one.",
)
GATE_WEIGHTS = Refusal("the gate is parametrized or pruned", "Make that permanent and remove it.")
WEIGHTS = Refusal("the layer is parametrized or pruned", "Make that permanent and remove it.")
SHADOWED = Refusal("another tensor stands in for a weight", "Weight dropout does that in training: call eval().")
WEIGHT_TYPE = Refusal("parameters are not contiguous float32 on the CPU", "Convert the layer with .float().")
INFERENCE_WEIGHTS = Refusal(
    "parameters were made in inference mode, so changes can't be seen", "Make the model outside of inference_mode()."
)
STATE_TYPE = Refusal("the state is not float32", "Convert the state with .float().")
LAYER_DROPOUT = Refusal("dropout between layers is active", "Right for training. Otherwise call eval().")
LAYER_HOOKS = Refusal("a matrix of the layer has forward hooks", "Remove the hooks.")


GPU_TYPES = (torch.float32, torch.float16, torch.bfloat16)
GATE_PARAMETERS = {"weight", "bias", "hidden_weight", "hidden_bias"}
# The methods of a gate that native code stands in for; others replace them on one object to change what it computes.
GATE_METHODS = frozenset({"decide", "forward", "key_of", "network", "scores"})


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
    # A kind without a network has no parameters that could have been replaced.
    if getattr(gate, "num_scores", 1) and not gate._parameters.keys() >= GATE_PARAMETERS:
        return GATE_WEIGHTS
    if not vars(type(gate)).get("native"):
        return _kind_refusal(gate)
    if gate._forward_hooks or gate._forward_pre_hooks:
        return GATE_HOOKS
    if not GATE_METHODS.isdisjoint(gate.__dict__):
        return GATE_PATCHED
    # The mark of fully_shard: the memory of whole weights comes and goes, and a copy of them could not be followed.
    if getattr(gate, "_is_fsdp_managed_module", False):
        return SHARDED
    if gate.backend == "triton":
        return TRITON
    return BACKEND if gate.backend == "reference" else None


def _kind_refusal(gate: nn.Module) -> Refusal:
    """What to do about a kind of gate that native code doesn't compute in the place of the gate."""
    if getattr(gate, "kind", None) != "norm":
        return GATE_KIND
    return NORM_COLUMNS if cast("Gate", gate).grid.block[1] == 1 else NORM_BLOCKS


def watcher_refusal(gate: nn.Module) -> Refusal | None:
    """`gate_refusal` where the gate's class, spec and parameters are known to be those of a gate without one."""
    own = gate.__dict__
    watched = own["_forward_hooks"] or own["_forward_pre_hooks"] or not GATE_METHODS.isdisjoint(own)
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


def gpu_refusal(dtype: torch.dtype, gate: Gate | None = None, stored_as: str | None = None) -> Refusal | None:
    """What about a matrix no GPU kernel computes: the type of its factors, its packed format, or its selection."""
    if dtype not in GPU_TYPES:
        return GPU_TYPE
    if stored_as is not None and stored_as not in gpu.FORMATS:
        return GPU_FORMAT
    return GPU_GROUP if gate is not None and gate.group_size > gpu.LARGEST_GROUP else None


def slower_path(refusal: Refusal, x: Tensor, backend: str, on_gpu: Iterable[Refusal | None]) -> Plan:
    """The plan of a layer that can't run in one native call: its ops, native where they can be.

    `on_gpu` is what `gpu_refusal` says of its matrices.
    """
    if backend != "reference" and (backend == "triton" or x.device.type in gpu.DEVICES):
        if (reason := gpu.device_refusal(x.device.type)) is not None:
            return Plan(REFERENCE, reason, "Run `blockgate info`, which says what there is.")
        unserved = next(filter(None, on_gpu), None)
        return Plan(OPS, *refusal) if unserved is None else Plan(REFERENCE, *unserved)
    by_reference = backend == "reference" or not x.is_cpu or native.unavailable_reason() is not None
    return Plan(REFERENCE if by_reference else OPS, *refusal)
