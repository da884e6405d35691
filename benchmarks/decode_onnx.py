"""A decode step of a `LlamaDecoder` in ONNX Runtime, int8, for benchmarks/decode_llama.py."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Step(nn.Module):
    """One token, with the cache as an input: what is new in it is an output, so that nothing else is copied."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, token: Tensor, place: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (1, words), new keys and values (L, shared, 1, width) for caches (L, shared, length, width)."""
        decoder = self.decoder
        x = decoder.embedding(token)
        cos, sin = decoder.cos[place].unsqueeze(0), decoder.sin[place].unsqueeze(0)
        unread = torch.arange(decoder.length) >= place
        new = []
        for i, layer in enumerate(decoder.layers):
            heads = layer.attention_in(layer.norms[0](x)).view(1, -1, layer.width).transpose(0, 1)
            query, key, value = heads.split([layer.heads, layer.shared, layer.shared])
            key = _rotated(key, cos, sin)
            new.append((key, value))
            groups = _rotated(query, cos, sin).reshape(layer.shared, -1, layer.width) * layer.width**-0.5
            scores = (groups @ keys[i].transpose(1, 2)).masked_fill(unread, -1e9)
            weights = torch.softmax(torch.cat([scores, groups @ key.transpose(1, 2)], -1), -1)
            read = weights[..., :-1] @ values[i] + weights[..., -1:] * value
            x = x + layer.attention_out(read.reshape(1, -1))
            gate, up = layer.mlp_in(layer.norms[1](x)).chunk(2, -1)
            x = x + layer.mlp_out(F.silu(gate) * up)
        keys, values = (torch.stack(part) for part in zip(*new, strict=True))
        return decoder.head(decoder.norm(x)), keys, values


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class OnnxDecoder(nn.Module):
    """The step in ONNX Runtime; the cache lies in its memory and is written in place.

    Args:
        decoder: dense; its cache is taken over as it is.
        file: of `write_int8`.
        threads: of each product.
    """

    def __init__(self, decoder: Any, file: Path, threads: int) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.cache = {n: np.stack([getattr(layer, n).numpy() for layer in decoder.layers]) for n in ("keys", "values")}

    def forward(self, token: Tensor, place: Tensor) -> Tensor:
        """Logits (1, words) for a token (1) at a place (1)."""
        given = {"token": token.numpy(), "place": place.numpy(), **self.cache}
        logits, keys, values = self.session.run(None, given)
        at = int(place)
        self.cache["keys"][:, :, at], self.cache["values"][:, :, at] = keys[:, :, 0], values[:, :, 0]
        return torch.from_numpy(logits)


def write_int8(decoder: Any, file: Path) -> None:
    """The step as an ONNX file: int8 weights with a scale for each output, inputs quantized as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    caches = [torch.stack([getattr(layer, name) for layer in decoder.layers]) for name in ("keys", "values")]
    given = (torch.tensor([7]), torch.tensor([32]), *caches)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        whole = Path(folder) / "float32.onnx"
        names = {"input_names": ["token", "place", "keys", "values"], "output_names": ["logits", "key", "value"]}
        torch.onnx.export(_Step(decoder).eval(), given, whole, dynamo=False, opset_version=17, **names)
        logging.disable(logging.WARNING)  # it advises a preparation that changes nothing here
        try:
            quantize_dynamic(
                whole, file, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"]
            )
        finally:
            logging.disable(logging.NOTSET)
