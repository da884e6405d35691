"""Millions of tokens through screened output layers of every kind, each against sorting all exact scores: no misses.

    python benchmarks/screened_certificate.py --tokens 2000000 --output benchmarks/results/screened-certificate.json

Layers and inputs are random, made for ties, for near ties, of very different scales, or chosen so that the scan errs as
much as its bound allows. Every layer serves a few hundred tokens; top 1, top k and the rank of a target are compared to
the last bit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from blockgate.lab.bench import machine
from blockgate.ops.screened_topk import make_screen, screened_rank, screened_topk
from blockgate.ops.screened_topk.reference import exact_scores
from blockgate.ops.screened_topk.screen import held_rows

# Tokens that share a layer.
OF_ONE_LAYER = 500


def kinds_of_layers() -> tuple[str, ...]:
    """The kinds of cases."""
    return ("random", "rounded", "near ties", "duplicates", "scales", "outliers", "against the bound", "peaked")


def make_case(kind: str, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (tokens, n), weight (V, n) and bias (V)."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows, depth = number(20, 90), number(1, 70)
    weight, bias, x = randn(rows, depth), randn(rows), randn(tokens, depth)
    if kind == "rounded":
        weight, bias, x = weight.round(), bias.round(), x.round()
    elif kind == "near ties":
        weight = weight[:1] * (1 + 2.0**-22 * torch.randint(-2, 3, (rows, depth), generator=generator))
        bias = bias * 1e-7
    elif kind == "duplicates":
        weight, bias = weight[torch.randint(4, (rows,), generator=generator)], bias.sign()
    elif kind == "scales":
        weight = weight * 10.0 ** (12 * randn(rows, 1).clamp(-3, 3))
        x = x * 10.0 ** (5 * randn(tokens, 1).clamp(-3, 3))
    elif kind == "outliers":
        x = x * 10.0 ** randn(1, depth)
        weight = weight * 10.0 ** randn(rows, 1)
    elif kind == "against the bound":
        missed = weight - held_rows(make_screen(weight, None), weight).float()
        x = missed[torch.randint(rows, (tokens,), generator=generator)] + 1e-3 * x * missed.std()
        bias = bias * missed.norm(dim=1).square().mean() - weight @ x[0]
    elif kind == "peaked":
        x = weight[torch.randint(rows, (tokens,), generator=generator)] + 0.3 * x
    return x, weight, bias


def misses(kind: str, *, tokens: int, generator: torch.Generator) -> int:
    """In how many of so many tokens anything differs."""
    wrong = 0
    for first in range(0, tokens, OF_ONE_LAYER):
        count = min(OF_ONE_LAYER, tokens - first)
        x, weight, bias = make_case(kind, count, generator)
        screen, scores = make_screen(weight, bias), exact_scores(x, weight, bias)
        expected = scores.sort(dim=1, descending=True, stable=True)
        k = int(torch.randint(1, min(12, len(weight)), (1,), generator=generator))
        good = torch.ones(count, dtype=torch.bool)
        for kept in (1, k):
            values, indices = screened_topk(x, weight, bias, *screen, kept)
            good &= (values == expected.values[:, :kept]).all(dim=1) & (indices == expected.indices[:, :kept]).all(
                dim=1
            )
        targets = torch.randint(len(weight), (count,), generator=generator)
        places = (expected.indices == targets[:, None]).int().argmax(dim=1)
        good &= screened_rank(x, targets, weight, bias, *screen) == places
        wrong += int((~good).sum())
    return wrong


def main() -> None:
    """Runs all kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the counts")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    kinds = kinds_of_layers()
    per_kind = -(-options.tokens // len(kinds))
    found = {}
    for kind in track(kinds, description="tokens"):
        found[kind] = {"tokens": per_kind, "misses": misses(kind, tokens=per_kind, generator=generator)}
    counts = {"seed": options.seed, "tokens": sum(kind["tokens"] for kind in found.values())}
    counts["misses"] = sum(kind["misses"] for kind in found.values())
    text = json.dumps({**machine.describe(), **counts, "kinds": found}, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
