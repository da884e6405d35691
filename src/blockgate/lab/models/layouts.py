"""The two layouts of a language model's recurrent layers, and the way from a checkpoint of one to the other.

All layers are one stack (`layers.0.weight_ih_l1`), or there is one module for each (`layers.1.weight_ih_l0`), as all
models had at first.
"""

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["layer_name", "stack_states"]

# The number of a module, the beginning of a name inside of it, and the number of a layer of that module. One of the two
# numbers is always 0, so that their sum is the number of the layer in the model.
PLACE = re.compile(r"layers\.(\d+)\.(filters\.|\w+_l)(\d+)(?=\.|$)")


def layer_name(name: str, *, stacked: bool) -> str:
    """The name of a parameter or gate of either layout in the layout that is asked for."""
    place = PLACE.match(name)
    if place is None:
        return name
    number, rest = int(place[1]) + int(place[3]), name[place.end() :]
    return f"layers.0.{place[2]}{number}{rest}" if stacked else f"layers.{number}.{place[2]}0{rest}"


def stack_states(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """The carried states of single layers as that of their stack."""
    if len(states[0]) == 1:
        # Quasi-RNN: each has a tuple of one entry for its one layer.
        return (tuple(state for (state,) in states),)
    # LSTM: h and c of shape (1, N, H) each.
    return (tuple(torch.cat(parts) for parts in zip(*states, strict=True)),)
