"""Configs of runs as JSON: those that come with the package, and files of others, which may build on them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from blockgate.errors import invalid
from blockgate.lab.training.config import Run, run_from_plain, run_to_plain

__all__ = ["defaults_taken", "load_run", "shipped_configs"]


def load_run(file: Path) -> Run:
    """A run from a JSON file. Its "base" names a config that comes with the package, whose values it may replace."""
    data = _read(file)
    run = run_from_plain(_on_base(data))
    return run if "output" in data else replace(run, output=Path("runs") / file.stem)


def defaults_taken(file: Path, run: Run) -> str:
    """What a config file of somebody's leaves to defaults and `run` uses, for people; empty if it names both itself."""
    data = _read(file)
    missing = [name for name in ("model", "optimizer") if name not in data]
    if "base" in data or not missing:
        return ""
    model = run_to_plain(run)["model"]
    layers = model.get("num_layers", model.get("hidden_layers"))
    used = {
        "model": f"{model['matrices']} matrices, {layers} layers of {model['hidden_size']}",
        "optimizer": f"{run.optimizer.kind}, learning rate {run.optimizer.lr:g}",
    }
    return (
        f"{file} leaves out {' and '.join(missing)}, so this run uses {'; '.join(used[name] for name in missing)}. "
        'Add "base": "NAME" to the file to start from a config that comes with blockgate.'
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise invalid("config", expected="a JSON file", got=f"{file}: {error}", remedy="Check the file.") from None
    if not isinstance(data, dict):
        raise invalid("config", expected="a JSON object", got=f"{file}: {data!r}", remedy="Check the file.")
    return data


def _on_base(data: dict[str, Any]) -> dict[str, Any]:
    """The plain data of a run with what its base says where it says nothing."""
    if "base" not in data:
        return data
    files = _shipped_files()
    if data["base"] not in files:
        raise invalid("base", expected=f"one of {tuple(files)}", got=data["base"], remedy="Or leave it out.")
    base = json.loads(files[data["base"]])
    if data.get("task", base["task"]) != base["task"]:
        raise invalid("task", expected=f"{base['task']!r}, as in the base", got=data["task"], remedy="Leave it out.")
    return _merged(base, {name: value for name, value in data.items() if name != "base"})


def _merged(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    both = {name: (base[name], data[name]) for name in base.keys() & data.keys()}
    nested = {n: _merged(a, b) for n, (a, b) in both.items() if isinstance(a, dict) and isinstance(b, dict)}
    return base | data | nested


def _shipped_files() -> dict[str, str]:
    """The text of the configs that come with the package, by name."""
    folder = resources.files("blockgate.lab") / "configs"
    with resources.as_file(folder) as path:
        return {file.stem: file.read_text() for file in sorted(path.glob("*.json"))}


def shipped_configs() -> dict[str, Run]:
    """The configs that come with the package, by name."""
    found = {name: run_from_plain(json.loads(text)) for name, text in _shipped_files().items()}
    return {name: replace(run, output=Path("runs") / name) for name, run in found.items()}
