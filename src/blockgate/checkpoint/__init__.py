"""Checkpoints that travel: a model or only its gates, with all that rebuilds the gated layers."""

from blockgate.checkpoint.load import load_pretrained
from blockgate.checkpoint.registry import register_model
from blockgate.checkpoint.save import save_pretrained

__all__ = ["load_pretrained", "register_model", "save_pretrained"]
