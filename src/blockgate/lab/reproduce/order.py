"""One experiment from its name to its report: arms that are left are trained, then measured and written up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.lab.data import load_corpus, load_images
from blockgate.lab.reproduce.arms import Arm, check_dropouts, run_of
from blockgate.lab.reproduce.clusters import SlurmOptions, make_cluster
from blockgate.lab.reproduce.curves import draw_curves
from blockgate.lab.reproduce.experiments import EXPERIMENTS, arms_of, choose_arms
from blockgate.lab.reproduce.jobs import Job
from blockgate.lab.reproduce.pace import check_levels, draw_pace, pace_section
from blockgate.lab.reproduce.quality import draw_quality, points_of
from blockgate.lab.reproduce.report import metric_of, table
from blockgate.lab.reproduce.results import load_result
from blockgate.lab.reproduce.sweep import run_jobs
from blockgate.lab.reproduce.timing import time_models
from blockgate.lab.reproduce.tiny import tiny_run
from blockgate.lab.training import Run, load_trained, shipped_configs
from blockgate.lab.training.config import LanguageModelRun

__all__ = ["Order", "reproduce", "write_up"]

# Timing spends this on each call.
SECONDS = {"tiny": 0.01, "laptop": 0.5, "paper": 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What is to be reproduced, and how: the fields are the options of the command."""

    experiment: str
    """One of EXPERIMENTS."""
    scale: Literal["tiny", "laptop", "paper"] = "laptop"
    """Sizes of models and length of training."""
    seeds: int = 1
    """How many runs of each arm; their seeds are 1, 2, ... (`medium` has two of its dense and 50% arms anyway)."""
    arms: tuple[str, ...] = ()
    """Names of arms, with wildcards as in 'ptb-lstm-*'. Default: all; see --list."""
    dropout: dict[str, float] = field(default_factory=dict)
    """Dropout of some kinds of arms, such as: dense 0.5 margin 0.3; that of the config if unset. To compare dropouts of
    one kind give each its own --output."""
    average_from: float | None = None
    """Epochs after which the weights of all arms are averaged over the updates that follow; no averages if unset."""
    jobs: int = 2
    """Arms at once, a process each."""
    threads: int = 1
    """CPU threads of each process."""
    cluster: Literal["local", "slurm"] = "local"
    """Where arms run: in processes of this machine, or as jobs of Slurm, which go on when this command ends."""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    """What each job asks of Slurm."""
    time: bool = False
    """When all arms are done, measure the time per token of the packed models. Let nothing else run meanwhile."""
    time_threads: int = 1
    """CPU threads of timing."""
    levels: tuple[float, ...] = ()
    """Valid perplexities, such as 130 120 115: a table says how long each arm trained to reach them, a picture shows
    perplexity against training time. Unset: those of the experiment, if it has any."""
    clock: Literal["wall", "processor"] = "wall"
    """What counts as training time. processor: pauses and other programs on the machine do not count."""
    output: Path = Path("runs/reproduce")
    """Folder for runs, results and reports; what tables and figures share is trained once."""
    data_dir: Path | None = None
    """Folder of the published data sets. Default: BLOCKGATE_DATA, or a folder in your cache."""


def reproduce(order: Order) -> Path:
    """Trains what is left of an experiment, and returns the report that it has written.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once checkpoints are written; the same call goes on from there.
    """
    for name in ("seeds", "jobs", "threads", "time_threads"):
        check_size(name, getattr(order, name))
    check_levels(order.levels)
    arms = choose_arms(order.experiment, order.scale, order.arms)
    if order.slurm.gpus and order.scale != "paper":
        raise invalid(
            "--slurm.gpus",
            expected="--scale paper with it",
            got=f"--scale {order.scale}",
            remedy="Arms of the other scales run on the CPU: leave it out.",
        )
    draw = EXPERIMENTS[order.experiment].draw
    if order.time and draw is not None:
        raise invalid("--time", expected="a table", got=order.experiment, remedy="Figures show no times.")
    folder = (order.output if order.cluster == "local" else order.output.absolute()) / order.scale
    bases = {task: _base_run(task, order, folder) for task in dict.fromkeys(arm.task for arm in arms)}
    check_dropouts(order.dropout, [arm for arm in arms if isinstance(bases[arm.task], LanguageModelRun)])
    words = {task: _check_data(base) for task, base in bases.items()}
    least = EXPERIMENTS[order.experiment].seeds
    seeds = {arm: max(order.seeds, least.get(arm.name, 1)) for arm in arms}
    jobs = [
        Job(arm.name, run_of(arm, replace(bases[arm.task], output=output, seed=seed), words[arm.task], order.dropout))
        for seed in range(1, max(seeds.values()) + 1)
        for arm in arms
        for output in [folder / arm.name / f"seed-{seed}"]
        if seed <= seeds[arm]
    ]
    for job in jobs:
        load_result(job.run.output, job.run)
    # Jobs of a cluster start elsewhere.
    cluster = make_cluster(order.cluster, (folder / ".jobs").absolute(), order.jobs, order.threads, order.slurm)
    folder.mkdir(parents=True, exist_ok=True)
    run_jobs(jobs, cluster, folder)
    text = _written_up(order, arms, jobs, folder) if draw is None else draw(_first_models(arms, jobs), folder)
    report = folder / f"{order.experiment}.md"
    write_whole(report, text)
    return report


def _base_run(task: str, order: Order, folder: Path) -> Run:
    """The run that all arms of a task share."""
    configs = shipped_configs()
    if order.scale == "tiny":
        base = tiny_run(configs[f"{task}-laptop"], folder / "data")
    else:
        base = configs[f"{task}-{order.scale}"]
    if order.average_from is not None:
        base = replace(base, optimizer=replace(base.optimizer, average_from=order.average_from))
    accelerator = base.accelerator if order.scale == "paper" else "cpu"
    return replace(base, accelerator=accelerator, threads=order.threads, data_dir=order.data_dir)


def _check_data(base: Run) -> int:
    """Size of the vocabulary, 0 for images; says how to get the data where they aren't there."""
    if isinstance(base, LanguageModelRun):
        return len(load_corpus(base.data, base.data_dir).vocabulary)
    load_images(base.data, base.data_dir)
    return 0


def _first_models(arms: Sequence[Arm], jobs: Sequence[Job]) -> dict[Arm, Any]:
    """The trained models of the first seed."""
    return {arm: load_trained(job.run.output) for arm, job in zip(arms, jobs, strict=False)}


def _written_up(order: Order, arms: Sequence[Arm], jobs: Sequence[Job], folder: Path) -> str:
    """The table, with the arms of this and of earlier calls."""
    times_file = folder / f"times-{order.experiment}.json"
    times: dict[str, Any] | None = json.loads(times_file.read_text()) if times_file.is_file() else None
    if order.time:
        times = _measured_times(order, _first_models(arms, jobs), times)
        write_whole(times_file, json.dumps(times, indent=1) + "\n")
    results: dict[str, list[dict[str, Any]]] = {}
    for arm in arms_of(order.experiment, order.scale):
        found = sorted((folder / arm.name).glob("seed-*/result.json"))
        results[arm.name] = [json.loads(file.read_text()) for file in found]
    return write_up(order, results, times, folder)


def write_up(order: Order, results: dict[str, list[dict[str, Any]]], times: dict[str, Any] | None, folder: Path) -> str:
    """The report of an experiment's results, in Markdown; draws its pictures into a folder.

    Args:
        order: says which experiment, and how to show it.
        results: by the name of the arm.
        times: what `time_models` gave, if anything.
        folder: for the pictures.
    """
    experiment, metric = EXPERIMENTS[order.experiment], metric_of(results)
    # There are many arms: rows of what was not run would hide the others.
    arms = [arm for arm in arms_of(order.experiment, order.scale) if results.get(arm.name)]
    levels = order.levels or experiment.levels
    parts = [table(experiment.title, arms, results, order.scale, times)]
    for task in dict.fromkeys(arm.task for arm in arms):
        of_task = [arm for arm in arms if arm.task == task]
        draw_curves(of_task, results, metric, folder / f"curves-{order.experiment}-{task}.png")
        points = [] if times is None else list(points_of(of_task, results, times, metric))
        if points:
            draw_quality(points, metric, folder / f"quality-{order.experiment}-{task}.png")
        if levels:
            file = folder / f"pace-{order.experiment}-{task}.png"
            draw_pace(of_task, results, metric, levels, file, order.clock)
    if levels:
        parts.append(pace_section(arms, results, metric, levels, order.clock))
    if experiment.more is not None:
        parts.append(experiment.more(arms, results, folder))
    return "\n".join(parts)


def _measured_times(order: Order, models: dict[Arm, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Times of these models, one task after the other, and those of others that were measured on the same machine."""
    made: dict[str, Any] = {}
    for task in dict.fromkeys(arm.task for arm in models):
        of_task = {arm: trained for arm, trained in models.items() if arm.task == task}
        new = time_models(of_task, threads=order.time_threads, seconds=SECONDS[order.scale])
        made = new | {part: made.get(part, {}) | new[part] for part in ("seconds", "quality")}
    if before is not None and before["machine"] == made["machine"]:
        for part in ("seconds", "quality"):
            made[part] = before.get(part, {}) | made[part]
    return made
