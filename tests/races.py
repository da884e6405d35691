"""What `make sanitize-threads` runs: every native path on several threads, from several Python threads at once."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn

import blockgate as bg
from blockgate.errors import BackendError
from blockgate.ops import native

FORMATS = ("float32", "bfloat16", "float16", "int8", "int8a8", "int4")


def layers() -> list[tuple[nn.Module, torch.Tensor]]:
    """One of every kind, with an input."""
    return [
        (bg.DynamicSparseLinear(300, 260, block_size=(64, 24), gate_hidden=8), torch.randn(90, 300)),
        (bg.DynamicSparseLinear(300, 260, block_size=(130, 1), gate="norm"), torch.randn(90, 300)),
        (bg.DynamicSparseLSTM(96, 96, 2, block_size=(64, 16)), torch.randn(5, 12, 96)),
        (bg.DynamicSparseQRNN(96, 96, 2, block_size=(64, 16)), torch.randn(5, 12, 96)),
        (bg.DynamicSparseGRU(96, 64, 2, bidirectional=True, block_size=(64, 16)), torch.randn(5, 12, 96)),
        (bg.DynamicSparseMLP(96, 300, glu=True), torch.randn(12, 96)),
    ]


def use(faults: list[str]) -> None:
    """Layers that this thread alone trains, decodes with and packs; their bits must not depend on the others."""
    torch.manual_seed(0)
    for layer, x in layers():
        for _ in range(2):
            y = layer(x)
            (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()
        layer.eval()
        for made in (layer, *(bg.pack(layer, name) for name in FORMATS)):
            check(made, x, faults)
    share(SHARED, faults)


def check(layer: nn.Module, x: torch.Tensor, faults: list[str]) -> None:
    """Three calls, which must give the same bits."""
    with torch.no_grad():
        results = [layer(x) for _ in range(3)]
    first = [r if isinstance(r, torch.Tensor) else r[0] for r in results]
    if not all(torch.equal(first[0], other) for other in first[1:]):
        faults.append(type(layer).__name__)


def share(shared: list[tuple[Any, torch.Tensor]], faults: list[str]) -> None:
    """Layers that all threads call at once, the first calls of which prepare them."""
    for layer, x in shared:
        check(layer, x, faults)
        if hasattr(layer, "topk"):
            found = [layer.topk(x, 5) for _ in range(3)]
            ranks = [layer.rank(x, torch.arange(len(x))) for _ in range(3)]
            if not all(torch.equal(found[0].indices, f.indices) for f in found) or not torch.equal(ranks[0], ranks[1]):
                faults.append("screened")


def made_to_share() -> list[tuple[Any, torch.Tensor]]:
    """Packed layers and an output layer that finds its largest scores."""
    made: list[tuple[Any, torch.Tensor]] = []
    for layer, x in layers():
        made += [(bg.pack(layer.eval(), name), x) for name in FORMATS]
    head = bg.pack(nn.Sequential(nn.Linear(96, 2000)), screened="0")
    return [*made, (head[0], torch.randn(4, 96))]


SHARED: list[tuple[Any, torch.Tensor]] = []


def main() -> int:
    """1 if results differed; races end the process with the code that TSAN_OPTIONS says."""
    try:
        native.isa()
    except BackendError as error:
        sys.stdout.write(f"SKIPPED: {error}\n")
        return 0
    torch.set_num_threads(3)
    SHARED.extend(made_to_share())
    faults: list[str] = []
    users = [threading.Thread(target=use, args=(faults,)) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    sys.stdout.write(f"{native.isa()}: {len(users)} threads, {len(faults)} faults {sorted(set(faults))}\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
