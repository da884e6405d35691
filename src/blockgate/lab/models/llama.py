"""A Llama-style decoder whose step is one graph: the weights of a model of transformers, on a cache of fixed length."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid
from blockgate.grid import check_size

__all__ = ["LlamaDecoder"]


class LlamaDecoder(nn.Module):
    """Tokens in, logits out; what came before lies in a cache of fixed length inside of the module.

    Shapes don't depend on how much has been read, so that `torch.compile(decoder, fullgraph=True)` makes one graph of
    all layers: no Python runs between them. The three projections of attention are one matrix, and so are gate and up
    of the MLP: four products a layer. Gate and pack it as any model, before compiling.

    Args:
        model: a LlamaForCausalLM of transformers; its weights are shared or copied, and it is left alone.
        length: places of the cache.
    """

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        config: Any = getattr(model, "config", None)
        if getattr(config, "model_type", None) != "llama" or config.hidden_act != "silu":
            raise invalid(
                "model",
                expected="a LlamaForCausalLM of transformers with SiLU",
                got=type(model).__name__,
                remedy="Models of another kind run with their own forward.",
            )
        body: Any = model.model
        self.length = check_size("length", length)
        self.embedding = nn.Embedding.from_pretrained(body.embed_tokens.weight.detach())
        self.layers = nn.ModuleList(_Layer(layer, config, self.length) for layer in body.layers)
        self.norm = _norm_of(body.norm)
        head: Any = model.lm_head
        self.head = _joined([head])
        cos, sin = body.rotary_emb(torch.zeros(1, 1), torch.arange(self.length)[None])
        self.register_buffer("cos", cos[0].detach().clone(), persistent=False)
        self.register_buffer("sin", sin[0].detach().clone(), persistent=False)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits (T, words) for tokens (T,) at these places (T,) of the text, whose keys and values are kept.

        Every token sees what was kept for places up to its own: read a text from place 0 on, without gaps.
        """
        x = self.embedding(tokens)
        cos, sin = (cast("Tensor", table)[places].unsqueeze(0) for table in (self.cos, self.sin))
        later = torch.arange(self.length, device=tokens.device) > places[:, None]
        hidden = torch.zeros(later.shape, device=x.device).masked_fill(later, -torch.inf)
        for layer in self.layers:
            x = layer(x, places, cos, sin, hidden)
        return cast("Tensor", self.head(self.norm(x)))


class _Layer(nn.Module):
    """Attention and MLP of one layer, with its part of the cache."""

    def __init__(self, layer: Any, config: Any, length: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.shared = config.num_attention_heads, config.num_key_value_heads
        self.width = attention.q_proj.out_features // self.heads
        self.norms = nn.ModuleList(map(_norm_of, (layer.input_layernorm, layer.post_attention_layernorm)))
        self.attention_in = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.attention_out = _joined([attention.o_proj])
        self.mlp_in = _joined([mlp.gate_proj, mlp.up_proj])
        self.mlp_out = _joined([mlp.down_proj])
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(self.shared, length, self.width), persistent=False)

    def forward(self, x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.attention_in(self.norms[0](x)), places, cos, sin, hidden))
        gate, up = self.mlp_in(self.norms[1](x)).chunk(2, -1)
        return cast("Tensor", x + self.mlp_out(F.silu(gate) * up))

    def _attend(self, joined: Tensor, places: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads (T, heads * width) for the three projections (T, ...) of T tokens."""
        tokens = len(joined)
        heads = joined.view(tokens, -1, self.width).transpose(0, 1)
        query, key, value = heads.split([self.heads, self.shared, self.shared])
        keys, values = cast("Tensor", self.keys), cast("Tensor", self.values)
        keys.index_copy_(1, places, _rotated(key, cos, sin))
        values.index_copy_(1, places, value)
        # The heads that share keys are rows of one product.
        groups = _rotated(query, cos, sin).reshape(self.shared, -1, self.width)
        scores = (groups @ keys.transpose(1, 2)).view(self.heads, tokens, -1) * self.width**-0.5
        weights = torch.softmax(scores + hidden, -1)
        read = weights.view(self.shared, -1, weights.shape[-1]) @ values
        return read.view(self.heads, tokens, self.width).transpose(0, 1).reshape(tokens, -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (heads, T, width) turned by the angles of its places."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _norm_of(norm: Any) -> nn.RMSNorm:
    made = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, device="meta")
    made.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
    return made


def _joined(parts: list[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of several that read the same input."""
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return made
