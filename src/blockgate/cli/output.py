"""What several commands share: facts one a line or as JSON, Markdown for people and pipes, the number of threads."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from rich.console import Console
from rich.markdown import Markdown

from blockgate.grid import check_threads

__all__ = ["print_facts", "print_markdown", "use_threads"]


def print_facts(facts: Mapping[str, str | float | None], *, as_json: bool) -> None:
    """Prints one fact a line, names and values in columns, or all as one JSON object."""
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = f"{value:.5g}" if isinstance(value, float) else "-" if value is None else value
        print(f"{name:<{width}}  {text}")


def print_markdown(text: str) -> None:
    """Prints Markdown: drawn on a terminal that is wide enough for its tables, as it is elsewhere.

    On a narrow terminal a drawn table would lose the ends of its cells; as it is, its lines wrap.
    """
    console = Console()
    widest = max((len(line) for line in text.splitlines() if line.startswith("|")), default=0)
    if console.is_terminal and console.width >= widest:
        console.print(Markdown(text))
    else:
        print(text)


def use_threads(threads: int | None) -> None:
    """Lets torch use as many threads as --threads says; its own number if None."""
    if threads is not None:
        torch.set_num_threads(check_threads("--threads", threads))
