"""The table of docs/models.md: what becomes of every model of the zoo, found out by doing it.

Run `python -m tests.model_table` after a change of the zoo or of what is supported.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.gates import Gate
from blockgate.inspect.table import markdown_table
from tests.model_zoo import CASES, Case, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = ["model", "class", "gated", "left dense", "close at 0%", "trains", "packs to", "saves and loads"]
# Relative errors that packing may make: rounding may also let a later gate open another block.
MOST_ERROR = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01, "int8": 0.1, "int8a8": 0.15, "int4": 0.4}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def kinds(layers: Iterable[Any]) -> str:
    """How many layers of each kind."""
    counts = Counter(layer.kind for layer in layers)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def converted(case: Case, **options: Any) -> tuple[torch.nn.Module, bg.convert.SparsifyReport]:
    torch.manual_seed(0)
    model = case.make().eval()
    return model, bg.sparsify_(model, block_size=16, **options)


def trains(case: Case) -> bool:
    """Whether a few updates on a ramp lower the loss, and reach every gate."""
    model, _ = converted(case, sparsity=0.0)
    example = case.example()
    target = run(model, example).detach() + 1
    optimizer, ramp = torch.optim.Adam(model.parameters(), 1e-2), bg.SparsityRamp(model, 0.5, 1, 5)
    losses = []
    for _ in range(10):
        loss = (run(model, example) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ramp.step()
        losses.append(loss.item())
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    reached = all(p.grad is not None and p.grad.count_nonzero() for gate in gates for p in gate.parameters())
    return reached and losses[-1] < 0.9 * losses[0] and all(gate.target_sparsity == 0.5 for gate in gates)


@torch.no_grad()
def packs(case: Case) -> str:
    """The formats in which the packed model gives nearly what the model gives."""
    model, _ = converted(case, sparsity=0.5)
    example = case.example()
    want = run(model, example)
    good = [form for form in FORMATS if difference(run(bg.pack(model, form), example), want) < MOST_ERROR[form]]
    return "all formats" if len(good) == len(FORMATS) else ", ".join(good) or "no"


@torch.no_grad()
def saves(case: Case) -> bool:
    """Whether a fresh dense model, and a packed one, take up what was saved."""
    model, _ = converted(case, sparsity=0.5)
    example = case.example()
    with tempfile.TemporaryDirectory() as folder:
        bg.save_pretrained(model, folder)
        loaded = bg.load_pretrained(folder, case.make().eval()).eval()
    packed = bg.pack(loaded)
    state = bg.pack(model).state_dict()
    packed.load_state_dict(state)
    want = run(model, example)
    return torch.equal(run(loaded, example), want) and difference(run(packed, example), want) < 1e-4


def attempt(step: Callable[[Case], Any], case: Case) -> str:
    """What a step says, or the error that it ends in."""
    try:
        said = step(case)
    except Exception as error:
        return f"no: {type(error).__name__}"
    return said if isinstance(said, str) else "yes" if said else "no"


def row(name: str, case: Case) -> list[str]:
    torch.manual_seed(1)
    model, report = converted(case, sparsity=0.5, example_input=case.example())
    close = report.relative_difference is not None and report.relative_difference < 0.05
    cells = [name, f"`{type(model).__name__}`", kinds(report.converted), kinds(report.skipped)]
    return [*cells, "yes" if close else "no", *(attempt(step, case) for step in (trains, packs, saves))]


def table() -> str:
    return words_only(HEAD, [row(name, case) for name, case in CASES.items()])


def words_only(head: list[str], rows: list[list[str]]) -> str:
    """A table without numbers, whose columns all begin at the left."""
    return markdown_table(head, rows).replace("--:", "---")


def reasons() -> str:
    """Why layers stay dense, and in which models."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, case in CASES.items():
        for layer in converted(case)[1].skipped:
            models = found.setdefault((layer.kind, layer.reason), [])
            models += [name] if name not in models else []
    rows = [[kind, reason, "; ".join(models)] for (kind, reason), models in found.items()]
    return words_only(["layer", "why it stays dense", "in"], rows)


def filled(page: str) -> str:
    """The page with both tables as they are now."""
    for mark, made in (("models", table()), ("reasons", reasons())):
        before, begin, rest = page.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert begin, mark
        assert end, mark
        page = f"{before}{begin}\n{made}\n{end}{after}"
    return page


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(filled(PAGE.read_text()))
