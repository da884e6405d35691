"""Results as Markdown for people, JSON for machines, and a plot of speed-up against density."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockgate.checkpoint.atomic import replace_whole, write_whole
from blockgate.errors import BlockgateError

if TYPE_CHECKING:
    from blockgate.lab.bench.linear import LinearResult
    from blockgate.lab.bench.targets import TargetResult
    from blockgate.lab.bench.training import TrainingResult

__all__ = ["head", "linear_markdown", "plot_speedups", "targets_markdown", "training_markdown", "write_report"]


def head(title: str, machine: dict[str, Any], roofs: dict[str, float], command: str, compared_with: str) -> str:
    """Title, what was run, on what and against what, and the roofs that were measured in the same run."""
    facts = "; ".join(f"{name} {value}" for name, value in machine.items())
    roof = (
        f"Plain read of 64 MiB: {roofs['read_bytes_per_second'] / 1e9:.1f} GB/s; dense fp32 product 2048^3: "
        f"{roofs['flops'] / 1e9:.0f} GFLOP/s."
    )
    return (
        f"# {title}\n\n`{command}`\n\n{facts}.\n\n{roof}\n\nRatios of medians to {compared_with}, measured side "
        "by side in one run with the arms interleaved; gates, selection and biases inside; every arm of ours checked "
        "against the reference first, with all scores positive, so that measured density equals the target.\n"
    )


def linear_markdown(result: LinearResult) -> str:
    """One case as a table: each arm with its time, spread, and the share of the roof it reaches."""
    lines = [
        f"\n## {result.case.title}\n",
        "| arm | median ms | p10 | p90 | p99 | speed-up | density | GB/s | GFLOP/s | error | gates changed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    size = result.case.out_features * result.case.in_features
    for arm in result.arms:
        t = result.timings[arm.name]
        rate = f"{arm.weight_bytes / t.median / 1e9:.1f}" if arm.weight_bytes else "-"
        flops = 2 * result.case.batch * size * arm.density / t.median / 1e9
        lines.append(
            f"| {arm.name} | {t.median * 1e3:.3f} | {t.p10 * 1e3:.3f} | {t.p90 * 1e3:.3f} | {t.p99 * 1e3:.3f} | "
            f"{result.speedup(arm):.2f}x | {arm.density:.3f} | {rate} | {flops:.0f} | {arm.error:.1e} | "
            f"{arm.changed_gates:.2%} |"
        )
    lines += [f"\nNot measured: {name} ({why})." for name, why in result.left_out.items()]
    lines.append(f"\nA plain read of the dense weight's bytes: {result.bandwidth / 1e9:.1f} GB/s.")
    return "\n".join(lines) + "\n"


def training_markdown(result: TrainingResult) -> str:
    """One training case as a table."""
    lines = [
        f"\n## Forward + backward, {result.case.title}\n",
        "| arm | median ms | p10 | p90 | speed-up | peak memory MB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, t in result.timings.items():
        peak = f"{result.memory[name] / 1e6:.0f}" if name in result.memory else "-"
        lines.append(
            f"| {name} | {t.median * 1e3:.2f} | {t.p10 * 1e3:.2f} | {t.p90 * 1e3:.2f} | {result.speedup(name):.2f}x | "
            f"{peak} |"
        )
    return "\n".join(lines) + "\n"


def targets_markdown(results: list[TargetResult]) -> str:
    """The table of promises: reached / floor at each sparsity, and what an evicted cache leaves of it."""
    lines = [
        "\n| work | dense ms | dense, packed | 50% | 75% | 90% | evicted cache | all floors met |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for result in results:
        reached = {
            s: f"{speedup:.2f}x (floor {floor:.3g}x)"
            for s, speedup, floor in zip(result.target.sparsities, result.speedups, result.target.floors, strict=True)
        }
        if 0.0 in reached:
            reached = {0.5: f"at 0%: {reached[0.0]}"}
        packed = "" if result.packed_dense is None else f"{result.packed_dense:.2f}x"
        cells = " | ".join(reached.get(s, "") for s in (0.5, 0.75, 0.9))
        cold = "" if result.cold_speedups is None else " / ".join(f"{s:.2f}x" for s in result.cold_speedups)
        if result.memory_ratios is not None:
            cold = "peak memory " + " / ".join(f"{ratio:.2f}" for ratio in result.memory_ratios) + " of dense"
        lines.append(
            f"| {result.target.work} | {result.dense_seconds * 1e3:.3f} | {packed} | {cells} | {cold} | "
            f"{'yes' if result.met else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


def write_report(stem: Path, markdown: str, data: dict[str, Any]) -> list[Path]:
    """Writes `stem`.md and `stem`.json whole, or not at all."""
    written = []
    for suffix, text in ((".md", markdown), (".json", json.dumps(data, indent=1) + "\n")):
        path = stem.with_name(stem.name + suffix)
        try:
            write_whole(path, text)
        except OSError as error:
            raise BlockgateError(f"report: expected to write {path}, got {error}. Choose another --output.") from error
        written.append(path)
    return written


def require_matplotlib() -> None:
    """Raises a clear error where plots can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BlockgateError("plot: expected matplotlib, got none. Run: pip install 'blockgate[train]'")


def plot_speedups(results: list[LinearResult], path: Path) -> None:
    """Speed-up against density for our arms of every case, with the ideal line 1 / density."""
    require_matplotlib()
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    densities = [d / 100 for d in range(8, 101)]
    axes.plot(densities, [1 / d for d in densities], color="black", linestyle="--", label="ideal: 1 / density")
    for number, result in enumerate(results):
        ours = [arm for arm in result.arms if arm.name.startswith("blockgate fp32") and "dense" not in arm.name]
        arms = sorted(ours, key=lambda arm: arm.density)
        axes.plot(
            [a.density for a in arms],
            [result.speedup(a) for a in arms],
            marker="os^Dvx*P"[number % 8],
            label=f"{result.case.out_features}x{result.case.in_features}, batch {result.case.batch}",
        )
    axes.set(xlabel="density (share of blocks open)", ylabel="speed-up over nn.Linear", yscale="log", xscale="log")
    axes.set_xticks([0.1, 0.25, 0.5, 1], ["10%", "25%", "50%", "100%"])
    axes.set_yticks([1, 2, 4, 8, 16], ["1x", "2x", "4x", "8x", "16x"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    try:
        with replace_whole(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    except OSError as error:
        raise BlockgateError(f"plot: expected to write {path}, got {error}. Choose another --output.") from error
    finally:
        plt.close(figure)
