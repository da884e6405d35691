"""Draws the pictures of the documentation, as SVG on a light ground that is legible in light and dark pages.

    python docs/pictures/draw.py

Gates are computed by blockgate from made-up scores. Times and perplexities come from the result files of
benchmarks/block_size.py and benchmarks/quality_and_time.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import blockgate as bg
from blockgate.ops import topk_gates

HERE = Path(__file__).parent
QUALITY = HERE.parents[1] / "benchmarks" / "results" / "quality-and-time_epyc-zen5_2-threads.json"
TIMES = HERE.parents[1] / "benchmarks" / "results" / "block-size_epyc-zen3_2-threads.json"

# Load average from which on the picture tells of it.
BUSY = 0.7
# The same for cores that other processes used.
BUSY_CORES = 0.25

INK, FAINT, CLOSED, KEY = "#263238", "#90a4ae", "#eceff1", "#ffb300"
# From a gate that is just open to a wide one.
OPEN = ("#d7f0ed", "#b2dfdb", "#93d3cb", "#74c6bc", "#4db6ac")
OPEN_DARK = "#00796b"
COLOURS = {"64": "#00897b", "128": "#5e35b1", "all": "#e64a19"}


class Picture:
    """Shapes of an SVG file, on a white card."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="13">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="{edge}"/>'
        )

    def line(
        self, points: list[tuple[float, float]], colour: str = INK, *, arrow: bool = False, dash: str = ""
    ) -> None:
        """A line through points; with an arrow, it ends in a small triangle that points right or down."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>'
        )
        if arrow:
            (x, y), before = points[-1], points[-2]
            wings = [(x - 7, y - 4), (x - 7, y + 4)] if before[0] < x else [(x - 4, y - 7), (x + 4, y - 7)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *wings])
            self.parts.append(f'<polygon points="{corners}" fill="{colour}"/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        """A small disc."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" stroke="#ffffff"/>')

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "middle", colour: str = INK, size: int = 13
    ) -> None:
        """A line of text."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'
        )

    def gates(self, x: float, y: float, gates: torch.Tensor, cell: float) -> None:
        """A grid of gates (rows, columns): closed ones pale, open ones the darker the wider, with their value."""
        for (row, column), value in zip(
            ((i, j) for i in range(gates.shape[0]) for j in range(gates.shape[1])),
            gates.flatten().tolist(),
            strict=True,
        ):
            left, top = x + column * cell, y + row * cell
            shade = OPEN[min(len(OPEN) - 1, int(value / gates.max().item() * len(OPEN)))]
            self.box(left, top, cell - 2, cell - 2, shade if value else CLOSED)
            if value:
                self.text(left + cell / 2 - 1, top + cell / 2 + 3, f"{value:.1f}", size=11)

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>\n"])


def some_scores(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Raw scores (1, rows * columns), as a gate might give them; in steps, so that all machines agree."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 100, (1, rows * columns), generator=generator) / 100


def gates_of(scores: torch.Tensor, rows: int, columns: int, sparsity: float, *, per_row: bool = False) -> torch.Tensor:
    """Gates (rows, columns) of root mean square 1."""
    groups = rows if per_row else 1
    kept = bg.grid.open_blocks(sparsity, rows * columns // groups)
    values, indices = topk_gates(scores, kept, groups=groups, normalise="rms")
    return torch.zeros(rows * columns).scatter(0, indices[0], values[0]).view(rows, columns)


def draw_grid() -> str:
    """One layer: input with its key, gate, blocks, output."""
    picture = Picture(720, 340, "A weight in 6 x 4 blocks, of which the gate opens a quarter for this input")
    cell, left, top = 38, 400, 82
    gates = gates_of(some_scores(6, 4, 1), 6, 4, 0.75)
    for column in range(4):
        picture.box(left + column * cell, 30, cell - 2, 18, KEY if column == 0 else CLOSED, FAINT)
    picture.text(left + 2 * cell, 20, "input x, n features")
    picture.text(left + 0.5 * cell, 64, "key", size=12)
    picture.gates(left, top, gates, cell)
    picture.text(left + 2 * cell, top + 6 * cell + 22, "weight W, m x n, in r x c = 6 x 4 blocks")
    for row in range(6):
        picture.box(left + 4 * cell + 60, top + row * cell, 18, cell - 2, CLOSED, FAINT)
    picture.text(left + 4 * cell + 69, top - 10, "output y")
    picture.line([(left + 4 * cell + 6, top + 3 * cell), (left + 4 * cell + 52, top + 3 * cell)], arrow=True)
    picture.box(40, 110, 130, 52, "#fff8e1", KEY)
    picture.text(105, 132, "gate")
    picture.text(105, 150, "one linear layer", size=11)
    picture.line([(left, 39), (105, 39), (105, 108)], KEY, arrow=True)
    picture.box(40, 206, 130, 52, "#ffffff", FAINT)
    picture.text(105, 228, "24 scores")
    picture.text(105, 246, "relu, top 6, scale", size=11)
    picture.line([(105, 162), (105, 204)], arrow=True)
    picture.line([(170, 232), (left - 8, 232)], arrow=True)
    picture.text(282, 222, "24 gates, 18 of them 0", size=12)
    picture.text(282, 250, "closed blocks are not read", size=12, colour="#607d8b")
    return picture.svg()


def draw_inputs() -> str:
    """The same grid for three inputs."""
    picture = Picture(720, 250, "The same layer and three inputs: each opens other blocks")
    for number in range(3):
        left = 60 + number * 220
        picture.text(left + 82, 24, f"input {number + 1}")
        picture.gates(left, 36, gates_of(some_scores(5, 5, 10 + number), 5, 5, 0.76), 33)
    picture.text(360, 232, "25 blocks at 76% sparsity: 6 open for each input, and not the same 6", colour="#607d8b")
    return picture.svg()


def draw_select() -> str:
    """The same scores, two ways to choose."""
    picture = Picture(720, 232, "The same scores, chosen among all blocks and in every row")
    scores = some_scores(4, 8, 5)
    for left, per_row, title in ((50, False, 'select="global"'), (400, True, 'select="per_row"')):
        picture.text(left + 132, 24, title)
        gates = gates_of(scores, 4, 8, 0.75, per_row=per_row)
        picture.gates(left, 36, gates, 33)
        for row in range(4):
            picture.text(left - 14, 57 + row * 33, str(int((gates[row] != 0).sum())), colour="#607d8b")
    picture.text(360, 204, "32 blocks at 75% sparsity: 8 open on either side; on the right, 2 in every row of blocks",
                 colour="#607d8b")  # fmt: skip
    return picture.svg()


def draw_ramp() -> str:
    """Sparsity over time, both shapes."""
    picture = Picture(560, 250, "Sparsity over training time, linear and cubic")
    left, top, width, height = 70, 24, 440, 170
    picture.line([(left, top), (left, top + height), (left + width, top + height)], FAINT)
    layer = bg.DynamicSparseLinear(8, 8, block_size=2)
    for shape, colour, label in (("linear", "#00897b", (330, 130)), ("cubic", "#5e35b1", (214, 62))):
        ramp = bg.SparsityRamp(layer, final=0.9, begin=25, end=75, shape=shape)
        points = [(left + s / 100 * width, top + height * (1 - ramp.sparsity_at(s))) for s in range(101)]
        picture.line(points, colour)
        picture.text(*label, shape, colour=colour)
    for share, words in ((0.0, "0"), (0.5, "0.5"), (0.9, "final 0.9")):
        picture.text(left - 6, top + height * (1 - share) + 4, words, anchor="end", size=11)
    for step, words in ((25, "begin"), (75, "end"), (100, "steps")):
        picture.text(left + step / 100 * width, top + height + 18, words, size=11)
        if step < 100:
            x = left + step / 100 * width
            picture.line([(x, top), (x, top + height)], FAINT, dash="3 4")
    picture.text(left + width / 2, 236, "SparsityRamp(model, final=0.9, begin=25, end=75)", colour="#607d8b", size=12)
    return picture.svg()


def draw_block_size(data: dict[str, Any]) -> str:
    """Measured times as dots, and what multiply-adds let expect as bars, in percent of the packed dense layer."""
    picture = Picture(720, 340, "Measured time of a gated layer at 90% sparsity, for several block and key sizes")
    left, top, width, height = 70, 58, 620, 210
    packed = next(entry for entry in data["results"] if entry["arm"] == "packed dense")["warm"]["median"]
    entries = [entry for entry in data["results"] if "block" in entry]
    blocks = sorted({entry["block"] for entry in entries}, reverse=True)
    shares = [entry["warm"]["median"] / packed for entry in entries]
    # Room above the highest for its number, below the legend.
    most = 1.1 * max([*shares, *(entry["mac_share"] for entry in entries)])
    for tick in range(0, int(most * 100) + 1, 20 if most < 1.2 else 40):
        y = top + height * (1 - tick / 100 / most)
        picture.line([(left, y), (left + width, y)], CLOSED)
        picture.text(left - 8, y + 4, f"{tick}%", anchor="end", size=11)
    for entry, share in zip(entries, shares, strict=True):
        key = "all" if entry["all"] else str(entry["key"])
        slot = width / len(blocks)
        x = left + slot * (blocks.index(entry["block"]) + 0.5) + (list(COLOURS).index(key) - 1) * slot * 0.24
        tall = height * entry["mac_share"] / most
        picture.box(x - 17, top + height - tall, 34, tall, COLOURS[key] + "40")
        picture.dot(x, top + height * (1 - share / most), COLOURS[key])
        picture.text(x, top + height * (1 - share / most) - 9, f"{share:.0%}", size=11)
    picture.line([(left, top + height), (left + width, top + height)], FAINT)
    for number, block in enumerate(blocks):
        picture.text(left + width / len(blocks) * (number + 0.5), top + height + 20, f"block {block}")
    for number, (key, colour) in enumerate(COLOURS.items()):
        picture.dot(left + 20 + number * 110, 40, colour)
        picture.text(left + 30 + number * 110, 44, f"key {key}", anchor="start")
    picture.text(left + width, 44, "dots: measured; bars: multiply-adds", anchor="end", colour="#607d8b", size=12)
    picture.text(left, 20, f"time in percent of the dense layer without gates, packed alike: {data['shape']}, batch 1, "
                 f"{data['sparsity']:.0%} sparse", anchor="start", size=12)  # fmt: skip
    busy = f"; measured on a busy machine, load average {data['load']:.1f}" if data["load"] > BUSY else ""
    machine = f"{data['machine']['cpu']}, {data['machine']['threads']} threads, float32{busy}"
    picture.text(left + width / 2, 325, machine, colour="#607d8b", size=11)
    return picture.svg()


def draw_quality(data: dict[str, Any]) -> str:
    """Time of one word, whole model, as bars, and beside it the test perplexity of the same model as dots."""
    picture = Picture(720, 350, "Milliseconds a word and test perplexity of language models: dense, pruned and gated")
    records = {record["name"]: record for record in data["results"]}
    fp32 = min((name for name in records if name.startswith("torch fp32")), key=lambda n: records[n]["median"])
    rows = (
        (fp32, "dense, torch float32", INK),
        ("torch int8 dynamic", "dense, torch int8", INK),
        ("ONNX Runtime int8", "dense, ONNX Runtime int8", INK),
        ("blockgate int8, dense", "dense, packed int8", INK),
        ("blockgate int8, 50% of the weights pruned", "50% of weights pruned, packed int8", "#e64a19"),
        ("blockgate int8, 90% of the blocks pruned", "90% of blocks pruned, packed int8", "#e64a19"),
        ("blockgate int8, gated, 50% closed", "50% gated, packed int8", OPEN_DARK),
        ("blockgate int8, gated, 90% closed", "90% gated, packed int8", OPEN_DARK),
    )
    left, width, most, top, step = 250, 190, 0.3, 64, 29
    right, wide, low, high = 500, 190, 140, 240
    picture.text(left, 24, "ms a word: shorter is faster", anchor="start", size=12)
    picture.text(right, 24, "test perplexity: further left is better", anchor="start", size=12)
    bottom = top + step * len(rows) - 8
    for tenth in range(4):
        x = left + width * tenth / 10 / most
        picture.line([(x, top - 10), (x, bottom)], CLOSED)
        picture.text(x, top - 18, f"{tenth / 10:.1f}", size=11)
    for tick in range(low, high + 1, 20):
        x = right + wide * (tick - low) / (high - low)
        picture.line([(x, top - 10), (x, bottom)], CLOSED)
        picture.text(x, top - 18, str(tick), size=11)
    for number, (name, words, colour) in enumerate(rows):
        y = top + step * number
        milliseconds, score = records[name]["median"] * 1e3, records[name]["perplexity"]
        picture.text(left - 10, y + 10, words, anchor="end", colour=colour)
        length = width * min(1.0, milliseconds / most)
        picture.box(left, y, length, 14, colour)
        if milliseconds > most:  # cut, and said so
            picture.line([(left + length - 16, y + 18), (left + length - 8, y - 4)], "#ffffff")
            picture.line([(left + length - 12, y + 18), (left + length - 4, y - 4)], "#ffffff")
        picture.text(left + length + 5, y + 11, f"{milliseconds:.2f}", anchor="start", size=11)
        x = right + wide * (score - low) / (high - low)
        picture.dot(x, y + 7, colour)
        picture.text(x + 8, y + 11, f"{score:.0f}", anchor="start", size=11)
    used = data["machine"]["used by other processes"]
    busy = f"; others used {used}" if float(used.split()[0]) > BUSY_CORES else ""
    machine = f"{data['machine']['cpu']}, {data['machine']['threads']} threads{busy}"
    picture.text(360, 316, "LSTM language model of 2 x 768, Penn Treebank, one epoch of training, seed 1",
                 colour="#607d8b", size=11)  # fmt: skip
    picture.text(360, 334, f"One word at a time, whole model; {machine}", colour="#607d8b", size=11)
    return picture.svg()


def main(output: Path, times: Path) -> None:
    """Writes all pictures."""
    output.mkdir(parents=True, exist_ok=True)
    drawn = {"grid": draw_grid(), "inputs": draw_inputs(), "select": draw_select(), "ramp": draw_ramp()}
    drawn["quality"] = draw_quality(json.loads(QUALITY.read_text()))
    drawn["block-size"] = draw_block_size(json.loads(times.read_text()))
    for name, text in drawn.items():
        part = output / f".{name}.part"
        part.write_text(text)
        part.replace(output / f"{name}.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--times", type=Path, default=TIMES, help="result file of benchmarks/block_size.py")
    main(**vars(parser.parse_args()))
