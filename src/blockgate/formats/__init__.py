"""Packed storage: the formats that weights can have for inference, each a registered object in a file of its own.

A format is `formats/<name>.py`, which says what is stored and judges the kernels, and its part of `csrc/` (see
`csrc/formats.h`). Files in this folder register themselves: a new one needs no edit here.
"""

import importlib
import pkgutil

from blockgate.formats.base import FORMATS, PANEL, Format, PackedWeight, get_format

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["FORMATS", "PANEL", "Format", "PackedWeight", "get_format"]
