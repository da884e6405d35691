"""What gates cost at 7B parameters, on paper: memory, messages and time of a training step for 8 to 512 GPUs.

    python benchmarks/scaling.py --output benchmarks/results/scaling-on-paper.md

Nothing here is measured. A layer list, the shapes of gates, and a few figures of a card are multiplied out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from blockgate.grid import BlockGrid
from blockgate.inspect.table import markdown_table

# Llama 2 7B: width, inner width, layers, words.
WIDTH, INNER, LAYERS, WORDS = 4096, 11008, 32, 32_000
MATRICES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
OTHER = 2 * WORDS * WIDTH
HEAD = WORDS * WIDTH
KEY, SPARSITY = 128, 0.75

# Bytes of a parameter: fp32 weight, gradient, two moments of Adam; and one in bfloat16.
STATE, HALF = 16, 2
# H100 SXM: dense bfloat16 operations and bytes of memory in a second; bytes a second to other nodes (400 Gbit).
FLOPS, MEMORY, NETWORK = 989e12, 3.35e12, 50e9
# Shares of the arithmetic peak: as docs/gpu.md takes them. Scores are float32 products, at TF32's half rate.
DENSE_SHARE, GATED_SHARE, SCORES_SHARE = 0.75, 0.40, 0.75 / 2
BATCH, SEQUENCE = 4_194_304, 4096


@dataclass(frozen=True)
class Model:
    """Counts of the model with blocks of one size; None for the dense one."""

    block: tuple[int, int] | None

    @property
    def grids(self) -> list[BlockGrid]:
        """Those of one layer of the model."""
        return [] if self.block is None else [BlockGrid(out, inputs, self.block) for out, inputs in MATRICES]

    @property
    def weights(self) -> int:
        """Parameters of the gated matrices."""
        return LAYERS * sum(out * inputs for out, inputs in MATRICES)

    @property
    def blocks(self) -> int:
        """Blocks, each of which has a score."""
        return LAYERS * sum(grid.num_blocks for grid in self.grids)

    @property
    def gates(self) -> int:
        """Parameters of the gates."""
        return self.blocks * (KEY + 1)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.weights + OTHER + self.gates

    @property
    def gate_memory(self) -> int:
        """Bytes that the gates of one layer of the model keep of a token: scores, and value and index where open."""
        return sum(grid.num_blocks * (4 + (1 - SPARSITY) * (4 + 8)) for grid in self.grids)

    @property
    def step_messages(self) -> int:
        """Bytes that each GPU receives in a step: weights before forward and backward, gradients, in bfloat16."""
        return 3 * HALF * self.parameters

    def seconds_per_token(self) -> tuple[float, float]:
        """Arithmetic of forward and backward, and the sums that go through memory, each on its own."""
        if self.block is None:
            return 6 * (self.weights + HEAD) / DENSE_SHARE / FLOPS, 0.0
        opened = (1 - SPARSITY) * self.weights
        work = opened / GATED_SHARE + self.gates / SCORES_SHARE + HEAD / DENSE_SHARE
        # Each open block adds to its outputs (forward) and to its inputs (backward): read and written, in float32.
        out, inputs = self.block
        return 6 * work / FLOPS, 8 * (opened / inputs + opened / out) / MEMORY


MODELS = {"dense": Model(None), "256 x 16": Model((256, 16)), "128 x 128": Model((128, 128))}


def write(file: Path) -> None:
    """All tables."""
    sizes = [
        [
            name,
            f"{m.parameters / 1e9:.2f}",
            f"{m.gates / 1e6:.0f} ({m.gates / m.weights:.1%})",
            f"{m.blocks / 1e6:.2f}",
            *(f"{STATE * m.parameters / gpus / 2**30:.2f}" for gpus in (8, 64, 512)),
            f"{m.gate_memory * SEQUENCE / 2**30:.2f}",
        ]
        for name, m in MODELS.items()
    ]
    head = ["blocks", "parameters, billions", "of gates, millions", "blocks, millions"]
    head += [f"GiB of states, {gpus} GPUs" for gpus in (8, 64, 512)]
    head += [f"GiB for {SEQUENCE} tokens a layer"]
    parts = ["# Scaling on paper", "## Memory", markdown_table(head, sizes)]
    times = []
    for gpus in (8, 64, 512):
        tokens = BATCH // gpus
        row = [str(gpus), f"{tokens:,}", f"{MODELS['dense'].step_messages / NETWORK:.2f}"]
        for m in MODELS.values():
            work, memory = (tokens * seconds for seconds in m.seconds_per_token())
            row += [f"{work:.2f}"] if m.block is None else [f"{work:.2f}", f"{memory:.2f}"]
        times.append(row)
    head = ["GPUs", "tokens each", "messages", "dense"]
    head += [f"{name}: {what}" for name in list(MODELS)[1:] for what in ("products", "sums in memory")]
    parts += ["## Time", markdown_table(head, times)]
    file.write_text("\n\n".join(part.rstrip() for part in parts) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scaling-on-paper.md"))
    write(parser.parse_args().output)
