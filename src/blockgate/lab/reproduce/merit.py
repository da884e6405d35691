"""What choosing is worth: gates between a static mask, which never chooses, and an oracle, which knows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockgate.checkpoint.atomic import replace_whole
from blockgate.inspect.table import markdown_table, to_percent
from blockgate.lab.baselines.oracle import recovered
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import density_of

__all__ = ["Merit", "draw_widths", "find_merits", "merit_section"]

# The masks that a gate is measured against: the better one counts.
STATIC = ("mask", "random")


@dataclass(frozen=True)
class Merit:
    """One gated model of one seed beside its controls; what was not trained or counted is None.

    Attributes:
        width: hidden units of a recurrent layer.
        static, score, oracle: test perplexity of the better static mask, of the gate and of the oracle.
        recovered: (static - score) / (static - oracle).
        density: of the layers, as measured.
        input_dependent, dead: shares of the blocks, the mean over layers.
    """

    arm: Arm
    seed: int
    cell: str
    width: int
    static: float | None
    score: float
    oracle: float | None
    recovered: float | None
    density: float
    input_dependent: float | None
    dead: float | None


def find_merits(arms: Sequence[Arm], results: dict[str, list[dict[str, Any]]], gates: Sequence[str]) -> list[Merit]:
    """One for each result of an arm of the kinds `gates`."""
    scores = {
        (arm.task, arm.family, arm.percent): {r["seed"]: r["test"]["perplexity"] for r in results.get(arm.name, [])}
        for arm in arms
    }
    merits = []
    for arm in arms:
        if arm.family not in gates:
            continue
        others = {kind: scores.get((arm.task, kind, arm.percent), {}) for kind in (*STATIC, "oracle")}
        for result in results.get(arm.name, []):
            seed, score, model = result["seed"], result["test"]["perplexity"], result["run"]["model"]
            static = min((others[kind][seed] for kind in STATIC if seed in others[kind]), default=None)
            oracle = others["oracle"].get(seed)
            merits.append(
                Merit(
                    arm=arm,
                    seed=seed,
                    cell=model["cell"],
                    width=model["hidden_size"],
                    static=static,
                    score=score,
                    oracle=oracle,
                    recovered=None if static is None or oracle is None else recovered(score, static, oracle),
                    density=density_of(result),
                    input_dependent=_mean_over_layers(result, "input_dependent"),
                    dead=_mean_over_layers(result, "dead"),
                )
            )
    return merits


def merit_section(merits: Sequence[Merit]) -> str:
    """Markdown: for each gated model the share of static minus oracle that it recovers."""
    if not merits:
        return ""
    head = ["task", "gate", "sparsity", "density", "seed", "static mask", "this gate", "oracle", "recovered"]
    rows = [
        [
            merit.arm.task,
            merit.arm.label,
            f"{merit.arm.percent}%",
            to_percent(merit.density),
            str(merit.seed),
            *("-" if value is None else f"{value:.2f}" for value in (merit.static, merit.score, merit.oracle)),
            *(to_percent(share) for share in (merit.recovered, merit.input_dependent, merit.dead)),
        ]
        for merit in merits
    ]
    return (
        "## How much of what choosing is worth the gates recover\n\n"
        "Test perplexity of the better static mask, the gate and the oracle; (static - gate) / (static - oracle). "
        "Input-dependent: neither open nor closed for 95% of the test words. Dead: opened by none of them.\n\n"
        + markdown_table([*head, "input-dependent", "dead"], rows)
    )


def draw_widths(merits: Sequence[Merit], file: Path) -> None:
    """Draws what LSTMs recover, and how many of their blocks depend on the input, by width; the mean of all seeds.

    Without any LSTM there is no file.
    """
    from matplotlib.figure import Figure

    merits = [merit for merit in merits if merit.cell == "lstm"]
    if not merits:
        return
    labels = _labels(merits)
    facts = {"recovered": "recovered of static minus oracle", "input_dependent": "blocks that depend on the input"}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(1, len(facts))
    for axis, (fact, title) in zip(axes, facts.items(), strict=True):
        lines: dict[str, dict[int, list[float]]] = {}
        for merit in merits:
            if (value := getattr(merit, fact)) is not None:
                line = lines.setdefault(labels[merit.arm.label, merit.arm.percent], {})
                line.setdefault(merit.width, []).append(100 * value)
        for label, line in lines.items():
            widths = sorted(line)
            axis.plot(widths, [statistics.mean(line[width]) for width in widths], "o-", label=label, linewidth=1.2)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("hidden units of each of two layers", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({merit.width for merit in merits}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.axhline(0, color="black", linewidth=0.8)
        axis.grid(alpha=0.3)
        axis.yaxis.set_major_formatter("{x:.0f}%")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    with replace_whole(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _labels(merits: Sequence[Merit]) -> dict[tuple[str, int | None], str]:
    """The name of a line in pictures, with the least and the largest density along it."""
    densities: dict[tuple[str, int | None], list[float]] = {}
    for merit in merits:
        densities.setdefault((merit.arm.label, merit.arm.percent), []).append(merit.density)
    labels = {}
    for (label, percent), found in densities.items():
        ends = dict.fromkeys(to_percent(density) for density in (min(found), max(found)))
        labels[label, percent] = f"{label}, {percent}% ({' to '.join(ends)} open)"
    return labels


def _mean_over_layers(result: dict[str, Any], fact: str) -> float | None:
    """None where it was not counted yet."""
    values = [gate[fact] for gate in result["gates"].values() if fact in gate]
    return sum(values) / len(values) if values else None
