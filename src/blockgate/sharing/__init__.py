"""Checkpoints that travel: a model or its gates alone, with all that rebuilds the gated layers."""

from blockgate.sharing.load import load_pretrained
from blockgate.sharing.registry import register_model
from blockgate.sharing.save import save_pretrained

__all__ = ["load_pretrained", "register_model", "save_pretrained"]
