"""Long use: decoding, training, packing, saving and loading by turns, with threads. `make soak`.

Memory must stay flat and results keep their bits: the sizes of batches change all the time, as they do in a server.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockgate.checkpoint import load_pretrained, save_pretrained
from blockgate.convert import pack, sparsify_
from blockgate.layers import DynamicSparseLSTM

__all__ = ["Decoder", "soak"]

# What memory may grow by after the first part of the time, in which pools and caches fill.
WARM_SHARE, MOST_GROWTH = 0.3, 0.1
SHORTEST_SECONDS = 30
READERS = 2


class Decoder(nn.Module):
    """A small language model's worth of layers: a stack of LSTMs and a feed-forward part, gated or dense."""

    def __init__(self, gated: bool = True) -> None:
        super().__init__()
        width = 256
        self.lstm: nn.Module = DynamicSparseLSTM(width, width, 2) if gated else nn.LSTM(width, width, 2)
        self.forward_part: nn.Module = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        if gated:
            sparsify_(self.forward_part, block_size=(64, 16), filter_fn=lambda *_: True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output (T, N, 256) for x (T, N, 256)."""
        y, _ = self.lstm(x)
        out: torch.Tensor = self.forward_part(y)
        return out


def resident() -> float:
    """Megabytes of memory that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status: expected VmRSS, got none. The soak needs Linux.")


def soak(seconds: float, *, gated: bool = True, say: Any = None) -> dict[str, Any]:
    """Runs the mix for some time.

    Args:
        seconds: how long.
        gated: whether layers are gated; torch's own dense ones for comparison.
        say: called with a line now and then.

    Returns:
        How often everything was done, the megabytes over time, and the faults found.
    """
    chance, start = random.Random(0), time.monotonic()
    model = Decoder(gated).eval()
    fixed = [torch.randn(steps, rows, 256) for steps, rows in ((1, 1), (1, 7), (9, 3))]
    made: dict[str, nn.Module] = {"plain": copy.deepcopy(model)}
    if gated:
        made |= {name: pack(model, name) for name in ("float32", "bfloat16", "float16", "int8", "int4")}
    with torch.inference_mode():
        expected = {name: [layer(x).clone() for x in fixed] for name, layer in made.items()}
    faults: list[str] = []
    counts = dict.fromkeys(("decoded", "trained", "packed", "saved", "compared"), 0)
    over, lock = threading.Event(), threading.Lock()

    def compare() -> None:
        while not over.is_set() and not faults:
            name = chance.choice(list(made))
            at = chance.randrange(len(fixed))
            with torch.inference_mode():
                if not _same(made[name](fixed[at]), expected[name][at], gated):
                    faults.append(f"{name}: other {'bits' if gated else 'numbers'} than at the start for input {at}")
            with lock:
                counts["compared"] += 1

    readers = [threading.Thread(target=compare) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    curve: list[tuple[float, float]] = []
    try:
        while (now := time.monotonic() - start) < seconds and not faults:
            _decode(made, chance)
            counts["decoded"] += 1
            _train(model, chance)
            counts["trained"] += 1
            if gated and chance.random() < 0.2:
                pack(model, chance.choice(["float32", "int8", "int4"]))(torch.randn(2, 3, 256))
                counts["packed"] += 1
            if chance.random() < 0.1:
                faults += _save_and_load(model, gated)
                counts["saved"] += 1
            if not curve or now - curve[-1][0] > seconds / 40:
                gc.collect()
                curve.append((round(now, 1), round(resident(), 1)))
                if say is not None:
                    say(f"{now:6.0f} s  {curve[-1][1]:7.0f} MB  {counts}")
    finally:
        over.set()
        for reader in readers:
            reader.join()
    return {"seconds": seconds, "gated": gated, "counts": counts, "megabytes": curve, "faults": faults + grown(curve)}


def grown(curve: list[tuple[float, float]]) -> list[str]:
    """A fault if memory went on growing after the first part of the time; a run that never got warm can't tell."""
    if not curve or curve[-1][0] < SHORTEST_SECONDS:
        return []
    warm = max(size for at, size in curve if at <= WARM_SHARE * curve[-1][0])
    last = min(size for _, size in curve[-3:])
    if last <= warm * (1 + MOST_GROWTH):
        return []
    return [f"memory: expected at most {100 * MOST_GROWTH:g}% more than {warm:.0f} MB, got {last:.0f} MB"]


def _same(y: torch.Tensor, wanted: torch.Tensor, gated: bool) -> bool:
    """Whether bits are equal; torch's own layers promise none from call to call, so theirs need only be close."""
    if gated:
        return torch.equal(y, wanted)
    return torch.allclose(y, wanted, rtol=1e-4, atol=1e-5)


def _decode(made: dict[str, nn.Module], chance: random.Random) -> None:
    with torch.inference_mode():
        for _ in range(20):
            x = torch.randn(chance.choice([1, 1, 1, 5]), chance.randint(1, 48), 256)
            made[chance.choice(list(made))](x)


def _train(model: nn.Module, chance: random.Random) -> None:
    model.train()
    x = torch.randn(chance.randint(2, 24), chance.randint(1, 32), 256)
    model(x).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-4)
            parameter.grad = None
    model.eval()


def _save_and_load(model: nn.Module, gated: bool) -> list[str]:
    x = torch.randn(1, 2, 256)
    with tempfile.TemporaryDirectory() as folder:
        if gated:
            save_pretrained(model, folder)
            other = load_pretrained(folder, Decoder(gated))
        else:
            torch.save(model.state_dict(), Path(folder, "model.pt"))
            other = Decoder(gated)
            other.load_state_dict(torch.load(Path(folder, "model.pt")))
    with torch.inference_mode():
        y, wanted = other.eval()(x), model(x)
    return [] if _same(y, wanted, gated) else ["a model that was saved and loaded gives other numbers"]


def main() -> int:
    """Runs for --minutes; 1 if memory grew or bits changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--dense", action="store_true", help="torch's own layers, for comparison")
    parser.add_argument("--output", type=Path, help="a file for the results as JSON")
    arguments = parser.parse_args()
    result = soak(60 * arguments.minutes, gated=not arguments.dense, say=lambda line: print(line, flush=True))  # noqa: T201
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for fault in result["faults"]:
        print(fault, file=sys.stderr)  # noqa: T201
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
