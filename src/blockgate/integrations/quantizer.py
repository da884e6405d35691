"""Gated layers in checkpoints of Hugging Face: what tells `from_pretrained` to gate a model before it loads weights."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from blockgate.checkpoint.layers import check_described, describe_layers, planned_gates, rebuild_layers
from blockgate.convert.replace import replace_layers
from blockgate.errors import invalid
from blockgate.gates import Gate
from blockgate.runtime.linear import RunnableLinear
from blockgate.runtime.packed import PackedLinear
from blockgate.runtime.packed_columns import PackedColumnLinear

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["BlockgateConfig", "BlockgateQuantizer", "keep_gates"]

METHOD = "blockgate"


@register_quantization_config(METHOD)
class BlockgateConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The entry `quantization_config` of a gated model's config.json.

    Args:
        layers: by name, the class and the options of every gated layer.
    """

    def __init__(self, layers: dict[str, Any] | None = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.layers = layers


@register_quantizer(METHOD)
class BlockgateQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts gated layers in the place of dense ones before weights are loaded. Nothing is quantized."""

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, *, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        layers = check_described(self.quantization_config.layers)
        # Before anything is made: a config may ask for more than any memory holds.
        planned = planned_gates(model, layers)
        if checkpoint_files is not None:
            _check_filled(planned, checkpoint_files)
        replace_layers(model, rebuild_layers(model, layers))
        # The config has the options of gates; what is loaded must be tensors of theirs.
        _save_options(model, False)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        _save_options(model, True)
        for layer in model.modules():
            if isinstance(layer, RunnableLinear):
                layer.gate.see(layer._matrix())
        # From here on it is a model like any other, free to move and to change its type.
        self.remove_quantization_config(model)
        keep_gates(model)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its tensors, and nothing for the file's header."""
        _save_options(model, False)
        try:
            return model.state_dict(), {}
        finally:
            _save_options(model, True)

    def is_serializable(self) -> bool:
        """Always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Always."""
        return True


def _check_filled(planned: dict[str, Tensor], files: list[str]) -> None:
    """Raises unless files hold gates of these sizes.

    By the ends of names: transformers changes their beginnings between some models and their files.
    """
    shapes = [(name, shape) for file in files for name, shape in _shapes_in(file)]
    left = Counter((_end(name), shape) for name, shape in shapes)
    for name, gate in planned.items():
        key = _end(name), tuple(gate.shape)
        left[key] -= 1
        if left[key] < 0:
            raise invalid(
                name,
                expected=f"a tensor in the weights file of the shape that the config says, {key[1]}",
                got=[shape for other, shape in shapes if _end(other) == key[0]][:4],
                remedy="Load a folder that save_pretrained wrote, unchanged.",
            )


def _shapes_in(file: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, of which none is read."""
    try:
        if not file.endswith(".safetensors"):
            state = torch.load(file, map_location="meta", weights_only=True)
            return [(name, tuple(tensor.shape)) for name, tensor in state.items()]
        with safe_open(file, framework="pt") as opened:
            return [(name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()]  # noqa: SIM118
    except Exception as error:
        raise invalid(
            file,
            expected="weights that transformers can read",
            got=" ".join(str(error).split())[:200],
            remedy="Save the model again.",
        ) from error


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _save_options(model: PreTrainedModel, wanted: bool) -> None:
    for module in model.modules():
        if isinstance(module, Gate):
            module.saves_values = wanted


def keep_gates(model: PreTrainedModel) -> None:
    """Makes `model.save_pretrained` write what `from_pretrained` needs to gate the model again."""
    model.save_pretrained = functools.partial(_save, model)


def _save(model: PreTrainedModel, *args: Any, **options: Any) -> None:
    """As `save_pretrained` of the model's class, with its gates in the config."""
    if any(isinstance(module, (PackedLinear, PackedColumnLinear)) for module in model.modules()):
        raise invalid(
            "save_pretrained",
            expected="a model that is not packed",
            got="packed layers",
            remedy="Save the model that it was packed from, and call bg.pack after loading.",
        )
    quantizer = BlockgateQuantizer(BlockgateConfig(describe_layers(model)))
    model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
    try:
        type(model).save_pretrained(model, *args, **options)
    finally:
        quantizer.remove_quantization_config(model)
        del model.is_quantized
