"""What the compilers say about the Triton kernels, and how fast they could be at best: figures on paper, no GPU needed.

    python benchmarks/gpu_roofline.py

writes `results/gpu-compiled.md` and `results/gpu-predicted.md`. A prediction is the sum over launches of the longest
among: arithmetic, memory, second-level cache, atomics, and, for few rows, the waiting of one program for one load after
the other. Nothing in it was measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from blockgate.grid import BlockGrid
from blockgate.ops.gated_linear.triton_cut import few_rows

RESULTS = Path(__file__).parent / "results"
OUT, IN, KEY = 6144, 1536, 128
BATCHES, DENSITIES, TILE_ROWS = (1, 16, 512, 4096), (0.5, 0.25, 0.1), 128
# Launches of a forward pass: scores (two from five rows on), selection, product; with many rows, lists besides: memory
# cleared twice, two kernels before and one after a sum, which is two. Backward: the gradient of the selection, five for
# the scores' parameters, four to bring the key's gradient to x, the lists again, two for x and gates, one for the
# weight, one for the bias.
LISTS = 7
LAUNCHES_FEW, LAUNCHES_MANY, LAUNCHES_BACKWARD = 3, 4 + LISTS, 14 + LISTS
FEW_SCORES = 4


@dataclass(frozen=True)
class Card:
    """Peak rates from the makers' data sheets (dense, no sparsity features); the cache from published measurements."""

    name: str
    half: float  # FLOP/s on tensor cores
    single: float  # FLOP/s outside of them
    memory: float  # bytes/s
    cache: float  # bytes/s
    atomics: float  # per second
    programs: int  # of a product of few rows that run at once: ten for each multiprocessor
    wait: float = 0.5e-6  # seconds that a load from memory takes in a busy card
    launch: float = 2e-6  # seconds that a launch costs inside a CUDA graph


CARDS = (
    Card("A100", 312e12, 19.5e12, 2.0e12, 5.0e12, 110e9, 1080),
    Card("H100", 989e12, 67e12, 3.35e12, 6.5e12, 160e9, 1320),
)
# Shares of the peak that are assumed: a library's dense product, our gathered one, elementwise work.
DENSE_SHARE, GATHERED_SHARE, PLAIN_SHARE = 0.75, 0.4, 0.5


def dense(card: Card, rows: int, size: int, products: int = 1) -> float:
    """Seconds of a dense layer: one product, or three with the backward pass."""
    peak = card.half if size == 2 else card.single
    work = 2 * rows * OUT * IN / (peak * DENSE_SHARE)
    traffic = size * (rows * (OUT + IN) + OUT * IN) / card.memory
    return products * (max(work, traffic) + card.launch)


def gate(card: Card, rows: int, blocks: int, products: int = 1) -> float:
    """Scores in float32 and the selection: 32 counts over every score, three instructions each."""
    scores = max(2 * rows * KEY * blocks / (card.single * DENSE_SHARE), 4 * blocks * (KEY + rows) / card.memory)
    selection = max(100 * rows * blocks / (card.single / 2 * PLAIN_SHARE), 8 * rows * blocks / card.memory)
    return products * scores + selection


def few_rows_product(
    card: Card, rows: int, grid: BlockGrid, density: float, size: int, shared: bool = True
) -> tuple[float, int]:
    """Seconds of a product of few rows, and how many programs share the open blocks of an output if they may."""
    entries = max(1, round(grid.num_blocks * density))
    cut = few_rows(rows, entries, grid, size)
    splits = cut.splits if shared else 1
    m, n, (height, width) = grid.out_features, grid.in_features, grid.block
    pairs, programs = rows * entries, cut.programs * splits
    work = 2 * pairs * height * width / (card.single * PLAIN_SHARE)
    traffic = m * n * size * (1 - (1 - density) ** rows) / card.memory
    # Every program looks through the entries of its row and through the row.
    cache = (pairs * height * width * size + programs * (12 * entries + n * size)) / card.cache
    steps = -(-entries // (grid.out_blocks * cut.at_once))
    loads = -(-entries // 1024) - (-n // 1024) - (-steps // splits) + 1
    waits = loads * card.wait * max(1, programs / card.programs)
    return max(work, traffic, cache, waits) + card.launch * (1 + (splits > 1)), splits


def ours(card: Card, rows: int, block: tuple[int, int], density: float, size: int, backward: bool) -> float:
    """Seconds of a gated layer, its gate included."""
    height, width = block
    blocks = (OUT // height) * (IN // width)
    pairs = rows * blocks * density
    peak = card.half if size == 2 else card.single
    touched = OUT * IN * size * (1 - (1 - density) ** rows)
    if rows <= 16:
        # The gate reads half precision as float32: one launch more.
        launches = LAUNCHES_FEW - 1 + (rows > FEW_SCORES) + (size == 2)
        product, _ = few_rows_product(card, rows, BlockGrid(OUT, IN, block), density, size)
        forward = gate(card, rows, blocks) + product + launches * card.launch
        if not backward:
            return forward
    # Rows that a product computes: a tile's list, filled up to whole steps of 16, 32 or 64.
    listed = min(rows, TILE_ROWS) * density
    step = 16 if listed <= 24 else 32 if listed <= 48 else 64
    filled = -(-listed // step) * step / listed
    tiles, parts = -(-rows // TILE_ROWS), -(-height // 128)
    lists = max(2 * pairs / card.atomics, 36 * pairs / card.cache)
    work = 2 * pairs * height * width * filled / (peak * GATHERED_SHARE)
    cache = pairs * (8 * height + size * width * parts) + tiles * OUT * IN * size
    traffic = touched + rows * (IN + OUT) * size
    if rows > 16:
        product = max(work, cache / card.cache, traffic / card.memory)
        forward = gate(card, rows, blocks) + lists + product + (LAUNCHES_MANY + (size == 2)) * card.launch
    if not backward:
        return forward
    inputs = pairs * (8 * width + size * (height + width)) + tiles * OUT * IN * size
    time = forward + max(work, inputs / card.cache, traffic / card.memory)
    weights = pairs * size * (height + width * parts)
    time += max(work / filled, weights / card.cache, traffic / card.memory)
    return time + lists + gate(card, rows, blocks, 2) + LAUNCHES_BACKWARD * card.launch


def predicted() -> str:
    """The page of predictions."""
    text = (
        "# Predicted times on GPUs\n\nA prediction on paper: nothing here was measured. Written by "
        "`benchmarks/gpu_roofline.py`, which has the\nassumptions. Layer of 6144 x 1536, key of 128, gate included; "
        "ratios against a dense layer of the same type at 75% of\nthe card's peak, above 1 where ours should win.\n"
    )
    for block in ((256, 16), (128, 128)):
        text += f"\n## Blocks of {block[0]} x {block[1]}\n\n"
        text += "| card | type | rows | dense us | forward 50 / 75 / 90% | with backward 50 / 75 / 90% |\n"
        text += "|---|---|--:|--:|--:|--:|\n"
        for card in CARDS:
            for kind, size in (("bfloat16", 2), ("float32", 4)):
                for rows in BATCHES:
                    base = dense(card, rows, size)
                    forward = [base / ours(card, rows, block, d, size, False) for d in DENSITIES]
                    both = [dense(card, rows, size, 3) / ours(card, rows, block, d, size, True) for d in DENSITIES]
                    ratios = (" / ".join(f"{r:.2f}x" for r in column) for column in (forward, both))
                    text += f"| {card.name} | {kind} | {rows} | {base * 1e6:.1f} | {' | '.join(ratios)} |\n"
    return text


def shared() -> str:
    """The table of products of one row, with and without programs that share the open blocks of an output."""
    head = " | ".join(f"{card.name}: {share} open" for card in CARDS for share in ("50%", "25%", "10%"))
    text = (
        "\n## One row, open blocks shared\n\nMicroseconds of the product, its launches included, in blocks of 256 x 16:"
        " one program for the open blocks of an output,\nthen several that share them, as many as in brackets, where"
        f" the kernels do so.\n\n| layer | type | {head} |\n|---|---|{'---|' * 6}\n"
    )
    for m, n in ((768, 3072), (1024, 4096), (4096, 11008), (768, 768), (2048, 512), (OUT, IN)):
        for kind, size in (("bfloat16", 2), ("float32", 4)):
            cells = []
            for card in CARDS:
                for density in DENSITIES:
                    grid = BlockGrid(m, n, (256, 16))
                    alone, _ = few_rows_product(card, 1, grid, density, size, shared=False)
                    time, splits = few_rows_product(card, 1, grid, density, size)
                    cells.append(f"{alone * 1e6:.1f}" + (f", {time * 1e6:.1f} ({splits})" if splits > 1 else ""))
            text += f"| {m} x {n} | {kind} | {' | '.join(cells)} |\n"
    return text


# The calls of the short table: those of a layer with its defaults.
COMMON = (
    "scores",
    "select margin",
    "bfloat16 few rows",
    "bfloat16 few rows, shared",
    "bfloat16 many rows",
    "packed few rows",
    "packed many rows of bfloat16",
    "pooling",
    "LSTM",
    "GRU",
)
HEAD = "registers | spilled | shared KB | warps | occupancy"


def compiled(targets: list[str]) -> str:
    """The page of what the compilers say."""
    from blockgate.lab.bench.gpu_kernels import Compiled, compile_launches
    from blockgate.lab.bench.gpu_launches import LAUNCHES

    def facts(k: Compiled) -> str:
        occupancy = f"{k.occupancy:.0%}" if k.target in {"sm_80", "sm_90"} else ""
        return f"{k.registers} | {k.spilled} | {k.shared / 1024:.1f} | {k.warps} | {occupancy}"

    found = {target: {name: compile_launches(call, target) for name, call in LAUNCHES.items()} for target in targets}
    text = (
        "# Triton kernels as compiled\n\nWritten by `benchmarks/gpu_roofline.py` from the compilers' output: "
        "registers of a thread, bytes of them that go to memory,\nshared memory and warps of a program, share "
        "of a multiprocessor's warps that fit, tensor-core instructions.\n"
    )
    first = targets[0]
    text += f"\n## Common calls\n\n| call | kernel | {' | '.join(f'{t}: {HEAD}' for t in targets)} |\n"
    text += f"|---|---|{'--:|' * 5 * len(targets)}\n"
    seen = set()
    for name in COMMON:
        for n, kernel in enumerate(found[first][name]):
            same = [found[target][name][n] for target in targets]
            # Calls share kernels: those of an earlier row are not shown again.
            line = f"| `{kernel.kernel}` | {' | '.join(map(facts, same))} |"
            if line not in seen:
                text += f"| {name} {line}\n"
            seen.add(line)
    for target in targets:
        text += f"\n## {target}\n\n| call | kernel | {HEAD} | tensor cores |\n|---|---|--:|--:|--:|--:|--:|---|\n"
        shown = set()
        for name, kernels in found[target].items():
            for k in kernels:
                fact = (k.kernel, k.registers, k.shared, k.warps, k.tensor_cores)
                if fact not in shown:
                    text += f"| {name} | `{k.kernel}` | {facts(k)} | {'yes' if k.tensor_cores else ''} |\n"
                shown.add(fact)
    return text


def main() -> None:
    """Writes both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=["sm_80", "sm_90"], help="compile for these; none: skip")
    options = parser.parse_args()
    RESULTS.joinpath("gpu-predicted.md").write_text(predicted() + shared())
    if options.targets:
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            RESULTS.joinpath("gpu-compiled.md").write_text(compiled(options.targets))


if __name__ == "__main__":
    main()
