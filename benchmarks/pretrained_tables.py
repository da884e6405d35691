"""Puts what the benchmarks of pre-trained models measured into the tables of docs/pretrained.md.

From the root of the repository, with their files in benchmarks/results/pretrained:

    python benchmarks/pretrained_tables.py
    python benchmarks/fill_tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results" / "pretrained"


def read(name: str) -> dict[str, Any]:
    """A result file; empty where it isn't there."""
    file = FOLDER / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown: names at the left, numbers at the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def decode_table() -> str:
    """Bytes, perplexity and milliseconds of a decode step."""
    times, quality, others = read("decode_time"), read("decode_quality"), read("llama_cpp")
    clocks: dict[str, Any] = times.get("milliseconds", {})
    if others:
        for threads, arms in others["milliseconds"].items():
            clocks.setdefault(threads, {}).update(arms)
    read_bytes = times.get("bytes of a step", {}) | quality.get("bytes of a step", {})
    found = quality.get("perplexity", {})
    names = list(dict.fromkeys([*found, *(name for arms in clocks.values() for name in arms)]))
    rows = []
    for name in names:
        size = f"{read_bytes[name] / 1e6:.0f}" if name in read_bytes else ""
        loss = f"{found[name]:.2f}" if name in found else ""
        row = [name, size, loss]
        for arms in clocks.values():
            row += [f"{arms[name][what]:.2f}" if name in arms else "" for what in ("median", "fastest tenth")]
        rows.append(row)
    columns = [f"{threads}, {what}" for threads in clocks for what in ("median", "fastest tenth")]
    return table(["model", "MB read", "perplexity", *columns], rows)


def encoder_table() -> str:
    """Cosines to the dense encoder after every step."""
    found = read("calibrate_encoder")
    steps = ("fresh", "calibrated", "solved", "reconstructed")
    arms = {name: arm for name, arm in found.items() if isinstance(arm, dict) and "fresh" in arm}
    used = [step for step in steps if any(step in arm for arm in arms.values())]
    rows = [[name, *(f"{arm[step]:.3f}" if step in arm else "" for step in used)] for name, arm in arms.items()]
    return table(["gates and blocks", *used], rows)


def classifier_table() -> str:
    """Accuracy of every arm, and milliseconds of a call by tokens and threads."""
    arms, times = read("finetune").get("arms", {}), read("classifier_times").get("milliseconds", {})
    sizes = [(threads, size) for threads, by_size in times.items() for size in by_size]
    timed = [name for threads, size in sizes for name in times[threads][size]]
    rows = []
    for name in dict.fromkeys([*arms, *timed]):
        right = f"{arms[name]['accuracy']:.1%}" if name in arms else ""
        taken = [times[threads][size].get(name) for threads, size in sizes]
        rows.append([name, right, *("" if t is None else f"{t['median']:.2f}" for t in taken)])
    return table(["model", "accuracy", *(f"{size}, {threads}" for threads, size in sizes)], rows)


def main() -> None:
    """Writes tables.md beside the result files."""
    tables = {"Decode": decode_table(), "Encoder": encoder_table(), "Classifier": classifier_table()}
    text = "# Models you already have\n" + "".join(f"\n## {name}\n\n{rows}\n" for name, rows in tables.items())
    (FOLDER / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
