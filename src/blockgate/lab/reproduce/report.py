"""The table of an experiment in Markdown, with the paper's numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from blockgate.errors import invalid
from blockgate.inspect.table import markdown_table, short, to_percent
from blockgate.lab.reproduce.arms import Arm
from blockgate.lab.reproduce.density import mean_density, open_share
from blockgate.lab.reproduce.experiments import PAPER
from blockgate.lab.reproduce.quality import points_of, quality_section
from blockgate.lab.reproduce.timing import BATCHES, ENGINES, PACKED, part_name
from blockgate.lab.training.config import differences

__all__ = ["metric_of", "table"]

# Results of an arm, one for each seed.
Results = dict[str, list[dict[str, Any]]]

# How numbers are written: ours, and the paper's.
METRICS = {"perplexity": ("{:.2f}", "{:.2f}"), "error": ("{:.2%}", "about {:.0%}")}

# What may differ between the runs of one task: all else is their common recipe.
OWN = ("model.", "optimizer.gate_lr:", "optimizer.revive:", "pruning.", "ramp.", "seed:")

NOTES = """\
- Density: share of the layers' blocks (dynamic, static) or weights (pruned) that an input meets, as measured on the
  test data; rounding to whole blocks makes it differ from 100% - sparsity.
- Input-dependent: share of blocks that are neither open nor closed for 95% of the test data, the mean over layers.
- MACs: multiply-adds for one token (image), gates and the whole output layer included; "layers": only of the layers
  that are gated or pruned, gates included, as a share of the dense ones.
- Parameters: gates included; pruned ones and those in blocks that are closed for good not counted.
- Small dense: the least width with at least the MACs of the dearer dynamic model at that sparsity.
"""


def table(title: str, arms: Sequence[Arm], results: Results, scale: str, times: dict[str, Any] | None = None) -> str:
    """The whole report.

    Args:
        title: of the experiment.
        arms: its rows.
        results: by the name of the arm; arms without results get an empty row.
        scale: of the runs.
        times: what `time_models` gave.
    """
    done = [result for of_arm in results.values() for result in of_arm]
    metric = metric_of(results)
    if not any(arm.facts.changes_recipe for arm in arms):
        _check_recipes(arms, results)
    head = [
        "task",
        "model",
        "sparsity",
        "density",
        "input-dependent",
        "parameters",
        "MACs",
        "layers",
        f"valid {metric}",
        f"test {metric}",
        "paper",
    ]
    dense = {arm.task: results[arm.name][0] for arm in arms if arm.kind == "dense" and results.get(arm.name)}
    rows = [_row(arm, results.get(arm.name, []), dense.get(arm.task), metric) for arm in arms]
    notes = NOTES + _dropouts(arms, results) + _about(scale, done)
    parts = [f"# {title}, {scale} scale\n", markdown_table(head, rows), notes]
    if len({arm.percent for arm in arms}) > 2:
        parts.append(_by_sparsity(arms, results, metric))
    parts.append(_against_reference(arms, results, dense, metric))
    if times is not None:
        points = list(points_of(arms, results, times, metric))
        parts += [_time_table(arms, results, times), quality_section(points, metric, METRICS[metric][0])]
    return "\n".join(parts)


def metric_of(results: Results) -> str:
    """What the models are judged by."""
    tests = [result["test"] for of_arm in results.values() for result in of_arm]
    return next((name for name in METRICS if tests and name in tests[0]), "perplexity")


def _check_recipes(arms: Sequence[Arm], results: Results) -> None:
    """Refuses to put results into one table that were trained in different ways."""
    first: dict[str, dict[str, Any]] = {}
    for arm in arms:
        for result in results.get(arm.name, []):
            one = first.setdefault(arm.task, result)
            changed = [text for text in differences(one["run"], result["run"]) if not text.startswith(OWN)]
            if changed:
                raise invalid(
                    f"results of {arm.task}",
                    expected=f"the recipe of {one['arm']}, seed {one['seed']}",
                    got=f"{arm.name}, seed {result['seed']}, with {'; '.join(changed)}",
                    remedy="Give another --output, or delete the folders of arms that are to be run again.",
                )


def _row(arm: Arm, results: list[dict[str, Any]], dense: dict[str, Any] | None, metric: str) -> list[str]:
    form, paper_form = METRICS[metric]
    start = [arm.task, arm.label, "-" if arm.percent is None else f"{arm.percent}%"]
    paper = paper_form.format(PAPER[arm.name]) if arm.name in PAPER else "-"
    if not results:
        return [*start, *["-"] * 7, paper]
    costs = results[0]["costs"]
    # The dense layers of all arms are alike, but for those of small dense models.
    whole = dense["costs"]["matrix_macs_dense"] if dense else None
    whole = costs["matrix_macs_dense"] if whole is None and not arm.facts.is_small else whole
    return [
        *start,
        to_percent(mean_density(results)),
        to_percent(_mean_of_gates(results, "input_dependent")),
        short(costs["parameters"] - costs["zeros"]),
        short(statistics.mean(result["costs"]["macs"] for result in results)),
        to_percent(None if whole is None else statistics.mean(r["costs"]["matrix_macs"] for r in results) / whole),
        *(_spread([result[part][metric] for result in results], form) for part in ("valid", "test")),
        paper,
    ]


def _by_sparsity(arms: Sequence[Arm], results: Results, metric: str) -> str:
    """The same scores in short: a row for each kind of model, a column for each sparsity."""
    form = METRICS[metric][0]
    percents = sorted({arm.percent or 0 for arm in arms})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for arm in arms:
        if results.get(arm.name):
            scores = [result["test"][metric] for result in results[arm.name]]
            share = open_share(arm, results[arm.name])
            cell = _spread(scores, form) + (f" ({share})" if share else "")
            cells.setdefault((arm.task, arm.label), {})[arm.percent or 0] = cell
    rows = [[*names, *(row.get(percent, "") for percent in percents)] for names, row in cells.items()]
    head = ["task", "model", *("dense" if percent == 0 else f"{percent}%" for percent in percents)]
    about = "In brackets the share of blocks or weights that is open, as measured.\n\n"
    return f"## Test {metric} by sparsity\n\n{about}" + markdown_table(head, rows)


def _against_reference(arms: Sequence[Arm], results: Results, dense: dict[str, Any], metric: str) -> str:
    """What each model is better or worse by than the plain gated one of an ablation, or than the dense one.

    Runs of the same seed see the same batches and start alike, so that their difference says more than two means do.
    """
    plain = any(arm.kind == "plain" and results.get(arm.name) for arm in arms)
    kind = "plain" if plain else "dense"
    scores = {arm.name: {r["seed"]: r["test"][metric] for r in results.get(arm.name, [])} for arm in arms}
    references = {arm.task: scores[arm.name] for arm in arms if arm.kind == kind}
    rows = []
    for arm in arms:
        reference = references.get(arm.task, {})
        changes = [score - reference[seed] for seed, score in scores[arm.name].items() if seed in reference]
        if changes and arm.kind != kind:
            row = _row(arm, results[arm.name], dense.get(arm.task), metric)
            rows.append([*row[:4], row[7], row[4], str(len(changes)), _signed(changes, METRICS[metric][0])])
    if not rows:
        return ""
    head = ["task", "model", "sparsity", "density", "layers", "input-dependent", "seeds", f"test {metric}"]
    return f"## Against the {kind} model, seed by seed\n\n" + markdown_table(head, rows)


def _signed(changes: list[float], form: str) -> str:
    """The mean change with its sign, and the least and the largest one where there are several."""
    signed = form.replace(":", ":+")
    mean = signed.format(statistics.mean(changes))
    return mean if len(changes) == 1 else f"{mean} ({signed.format(min(changes))} to {signed.format(max(changes))})"


def _mean_of_gates(results: list[dict[str, Any]], fact: str) -> float | None:
    """A fact about the gates of every layer: the mean over layers and seeds, None where there are no gates."""
    values = [facts[fact] for result in results for facts in result["gates"].values()]
    return statistics.mean(values) if values else None


def _spread(values: list[float], form: str) -> str:
    """The mean, and the standard deviation where there are several."""
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ± {form.format(statistics.stdev(values))}"


def _dropouts(arms: Sequence[Arm], results: Results) -> str:
    """What dropout each kind has, where those of a task differ by more than their names say."""
    lines = []
    for task in dict.fromkeys(arm.task for arm in arms):
        kinds: dict[str, float] = {}
        for arm in arms:
            for result in results.get(arm.name, []) if arm.task == task and arm.kind == arm.family else ():
                kinds[arm.label] = result["run"].get("model", {}).get("dropout", 0.0)
        if len(set(kinds.values())) > 1:
            lines.append(f"- Dropout, {task}: {', '.join(f'{kind} {share:g}' for kind, share in kinds.items())}.\n")
    return "".join(lines)


def _about(scale: str, done: list[dict[str, Any]]) -> str:
    """Where the numbers come from."""
    if not done:
        return "- No arm is done yet.\n"
    machines = {f"{r['machine']['cpu']}, torch {r['machine']['torch']}, commit {r['machine']['commit']}" for r in done}
    seeds = sorted({result["seed"] for result in done})
    text = f"- Seeds {', '.join(map(str, seeds))}; the best epoch by validation. {'; '.join(sorted(machines))}.\n"
    if scale != "paper":
        text += "- Smaller models and shorter training than the paper's: compare rows only with each other.\n"
    return text


def _time_table(arms: Sequence[Arm], results: Results, times: dict[str, Any]) -> str:
    """Microseconds per token: one text, whole model and layers only; several at once; and the likeliest word."""
    about = times["machine"]
    parts = []
    for batch in BATCHES:
        names = {part_name("model", batch): "", part_name("layers", batch): ", layers"}
        parts.append(_times(f"## Time per token in microseconds, batch {batch}", names, arms, results, times))
    likeliest = {part_name("likeliest", batch): f", batch {batch}" for batch in BATCHES}
    parts.append(_times("## Time per likeliest word in microseconds", likeliest, arms, results, times))
    return "\n".join(filter(None, parts)) + (
        f"\nMedians on {about['cpu']}, {about['threads']} thread(s), {about['instruction set']}, "
        f"torch {about['torch']}, commit {about['commit']}. torch: as trained. {', '.join(PACKED)}: packed. "
        "CSR: torch's sparse format. Screened: the output layer finds the likeliest word without scoring all.\n"
    )


def _times(title: str, names: dict[str, str], arms: Sequence[Arm], results: Results, times: dict[str, Any]) -> str:
    """A table with a column for each part and engine that was timed; empty if none was.

    Args:
        title: above the table.
        names: of the parts, and what their columns add to the engine's name.
        arms: the rows; those without times are left out.
        results: by the name of the arm.
        times: what `time_models` gave.
    """
    of_arms = {arm: times["seconds"].get(arm.name, {}) for arm in arms}
    columns = [
        (engine, part)
        for part in names
        for engine in ENGINES
        if any(part in of_arm.get(engine, {}) for of_arm in of_arms.values())
    ]
    rows = []
    for arm, of_arm in of_arms.items():
        cells = [_micro(of_arm.get(engine, {}).get(part)) for engine, part in columns]
        if any(cell != "-" for cell in cells):
            asked = "-" if arm.percent is None else f"{arm.percent}%"
            rows.append([arm.task, arm.label, asked, to_percent(mean_density(results.get(arm.name, []))), *cells])
    if not rows:
        return ""
    head = ["task", "model", "sparsity", "density", *(f"{engine}{names[part]}" for engine, part in columns)]
    return f"{title}\n\n{markdown_table(head, rows)}"


def _micro(facts: dict[str, float] | None) -> str:
    return "-" if facts is None else f"{facts['median'] * 1e6:.1f}"
