"""Writes results.bin: small problems with what the reference makes of them, for driver.cpp.

Run `python -m tests.aarch64.make_results` after a change of the reference or of a packed format.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

from blockgate.formats import FORMATS

RESULTS = Path(__file__).with_name("results.bin")
OPS = torch.ops.blockgate

# (out, in, block_out, block_in, tokens): ragged, thin, wider than a panel, and more tokens than one buffer takes.
GRIDS = {
    "ragged": (50, 37, 16, 8, 5),
    "thin": (64, 24, 32, 4, 7),
    "many": (20, 12, 8, 8, 40),
    "one": (40, 30, 24, 9, 1),
}
RULES = ("mean", "rms", "none", "margin", "margin_near_dense")
TYPES = {"f32": torch.float32, "f64": torch.float64}

# name, kind, sizes and numbers of each array: see `read` in driver.cpp.
KINDS = {
    torch.float32: "f",
    torch.float64: "d",
    torch.int64: "i",
    torch.int8: "b",
    torch.uint8: "b",
    torch.bfloat16: "b",
    torch.float16: "b",
}


def problems() -> dict[str, Tensor]:
    """Every array, by name; the same numbers on every machine."""
    generator = torch.Generator().manual_seed(20)

    def draw(*sizes: int) -> Tensor:
        # Multiples of 1/256 are the same in every type.
        return torch.randint(-256, 257, sizes, generator=generator).double() / 256

    arrays: dict[str, Tensor] = {}
    for name, (out, inputs, *block, tokens) in GRIDS.items():
        rows, columns = -(-out // block[0]), -(-inputs // block[1])
        gates, indices = _gates(draw(tokens, rows * columns).abs(), rows * columns // 2)
        weight, bias, x, grad = draw(out, inputs), draw(out), draw(tokens, inputs), draw(tokens, out)
        for kind, dtype in TYPES.items():
            given = [t.to(dtype) for t in (x, weight, bias, gates)]
            y = OPS.gated_linear_reference(*given, indices, block)
            needs = (True, True, True)
            back = OPS.gated_linear_backward_reference(
                grad.to(dtype), given[0], given[1], given[3], indices, block, *needs
            )
            parts = {"grid": torch.tensor([out, inputs, *block, rows, columns, tokens, gates.shape[1]])}
            parts |= dict(zip(("x", "weight", "bias", "gates"), given, strict=True)) | {"indices": indices}
            parts |= {"y": y, "grad_y": grad.to(dtype)}
            parts |= dict(zip(("grad_x", "grad_weight", "grad_gates"), back, strict=True))
            arrays |= {f"linear.{name}.{kind}.{part}": value for part, value in parts.items()}
    _add_packed(arrays)
    _add_selections(arrays, draw)
    _add_cells(arrays, draw)
    return arrays


def _gates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row and their blocks, ascending; the smallest of each row is closed."""
    values, indices = scores.topk(count, dim=1)
    values[:, -1] = 0
    order = indices.argsort(dim=1)
    return values.gather(1, order), indices.gather(1, order)


def _add_packed(arrays: dict[str, Tensor]) -> None:
    """The products of `ragged` and `one` with weights packed to every format."""
    for name in ("ragged", "one"):
        given = {part: arrays[f"linear.{name}.f32.{part}"] for part in ("x", "weight", "bias", "gates", "indices")}
        grid = arrays[f"linear.{name}.f32.grid"][:4].tolist()
        for form in FORMATS:
            blocks, scale = OPS.pack_blocks_reference(given["weight"], grid[2:], form)
            y = OPS.packed_linear_reference(
                given["x"], blocks, scale, given["bias"], given["gates"], given["indices"], grid, form
            )
            arrays |= {
                f"packed.{name}.{form}.{part}": v for part, v in (("blocks", blocks), ("scale", scale), ("y", y))
            }


def _add_selections(arrays: dict[str, Tensor], draw) -> None:
    """Selection and its gradient by every rule, in one group and in several."""
    for groups, kept in ((1, 9), (4, 3)):
        scores = draw(3, 28)
        scores[0, :20] = scores[0, 0]  # ties
        grad = draw(3, groups * kept)
        for rule in RULES:
            for kind, dtype in TYPES.items():
                gates, indices = OPS.topk_gates_reference(scores.to(dtype), [kept, groups], rule)
                back = OPS.topk_gates_backward_reference(
                    grad.to(dtype), scores.to(dtype), gates, indices, [kept, groups], rule
                )
                parts = {"scores": scores.to(dtype), "gates": gates, "indices": indices}
                parts |= {"grad_gates": grad.to(dtype), "grad_scores": back}
                arrays |= {f"topk.{rule}.{groups}.{kept}.{kind}.{part}": v for part, v in parts.items()}


def _add_cells(arrays: dict[str, Tensor], draw) -> None:
    """A step of the LSTM cell and one of the GRU cell, by their formulas."""
    sums, before, inputs = 4 * draw(3, 4, 21), draw(3, 21), 4 * draw(3, 3, 21)
    for kind, dtype in TYPES.items():
        i, f, g, o = sums.to(dtype).unbind(1)
        c = f.sigmoid() * before.to(dtype) + i.sigmoid() * g.tanh()
        parts = {"sums": sums.to(dtype), "before": before.to(dtype), "c": c, "h": o.sigmoid() * c.tanh()}
        arrays |= {f"lstm.{kind}.{part}": value for part, value in parts.items()}
        (r, z, n), (to_r, to_z, to_n) = sums[:, :3].to(dtype).unbind(1), inputs.to(dtype).unbind(1)
        new = (to_n + (to_r + r).sigmoid() * n).tanh()
        parts = {"sums": sums[:, :3].to(dtype), "input": inputs.to(dtype), "before": before.to(dtype)}
        parts |= {"h": new + (to_z + z).sigmoid() * (before.to(dtype) - new)}
        arrays |= {f"gru.{kind}.{part}": value for part, value in parts.items()}


def to_bytes(arrays: dict[str, Tensor]) -> bytes:
    """The file: for each array its name, its kind, how many bytes, and these."""
    parts = [struct.pack("<q", len(arrays))]
    for name, tensor in arrays.items():
        data = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()) if tensor.numel() else b""
        parts.append(struct.pack("<q", len(name)) + name.encode() + KINDS[tensor.dtype].encode())
        parts.append(struct.pack("<q", len(data)) + data)
    return b"".join(parts)


def from_bytes(data: bytes) -> dict[str, tuple[str, bytes]]:
    """Kind and bytes of each array of a file."""
    (count,), place, arrays = struct.unpack_from("<q", data), 8, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<q", data, place)
        name = data[place + 8 : place + 8 + length].decode()
        place += 8 + length
        (size,) = struct.unpack_from("<q", data, place + 1)
        arrays[name] = (chr(data[place]), data[place + 9 : place + 9 + size])
        place += 9 + size
    return arrays


if __name__ == "__main__":
    RESULTS.write_bytes(to_bytes(problems()))
