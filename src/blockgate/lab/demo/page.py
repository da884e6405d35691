"""The demo's results for people: one table, and one page that needs nothing but itself."""

from __future__ import annotations

import json
import shlex
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from blockgate._version import __version__
from blockgate.checkpoint.atomic import write_whole
from blockgate.errors import invalid
from blockgate.inspect.table import markdown_table, short, to_percent
from blockgate.lab.demo.arms import CURVE_WORDS
from blockgate.lab.demo.charts import distribution_chart, speed_chart, trace_chart, training_chart
from blockgate.lab.demo.gates import Trace
from blockgate.lab.demo.verdict import quality_sentence, speed_cell, speed_sentence

__all__ = ["HEAD", "results_table", "table_rows", "write_page"]

HEAD = [
    "model",
    "run by",
    "perplexity",
    "multiply-adds",
    "open",
    "us per token",
    "p10-p90",
    "tokens/s",
    "speed-up",
]
PAGE, NUMBERS = "report.html", "numbers.json"


def table_rows(numbers: dict[str, Any]) -> list[list[str]]:
    """A row for every way that a model was run, in the order of HEAD."""
    density = {arm["name"]: arm["density"] for arm in numbers["arms"]}
    return [
        [
            one["label"],
            one["engine"],
            "-" if one["test_perplexity"] is None else f"{one['test_perplexity']:.1f}",
            short(one["macs"]),
            to_percent(density[one["model"]]),
            f"{one['seconds'] * 1e6:.0f}",
            f"{one['p10'] * 1e6:.0f}-{one['p90'] * 1e6:.0f}",
            f"{one['tokens_per_second']:,.0f}",
            speed_cell(numbers, one),
        ]
        for one in numbers["speeds"]
    ]


def results_table(numbers: dict[str, Any]) -> str:
    """The table in Markdown."""
    return markdown_table(HEAD, table_rows(numbers))


def write_page(numbers: dict[str, Any], trace: Trace, folder: Path) -> Path:
    """Writes the page and the numbers behind it, each whole or not at all; other files are left alone."""
    page = _page(numbers, trace, folder)
    try:
        write_whole(folder / NUMBERS, json.dumps(numbers, indent=1) + "\n")
        write_whole(folder / PAGE, page)
    except OSError as error:
        raise invalid(
            "--output",
            expected="a folder that can be written to",
            got=f"{folder} ({error.strerror})",
            remedy="Give another one.",
        ) from None
    return folder / PAGE


def _page(numbers: dict[str, Any], trace: Trace, folder: Path) -> str:
    gated = [arm for arm in numbers["arms"] if arm["sparsity"] is not None]
    template = Template((resources.files("blockgate.lab.demo") / "page.html").read_text(encoding="utf-8"))
    threads = numbers["threads"]
    return template.substitute(
        warning=_warning(numbers),
        verdict=escape(f"{quality_sentence(numbers)} {_capital(speed_sentence(numbers))}"),
        table=_table(numbers),
        threads=f"{threads} thread" + ("" if threads == 1 else "s"),
        baseline=escape(numbers["fastest_dense"]),
        left_out="".join(
            f"<p>Not measured: {escape(n)} ({escape(why)}).</p>" for n, why in numbers["left_out"].items()
        ),
        training_chart=training_chart(numbers["arms"]),
        training_legend=_legend([arm["label"] for arm in numbers["arms"]], _LINES),
        layers_baseline=escape(numbers["layers"]["fastest_dense"]),
        speed_chart=speed_chart(numbers["layers"], numbers["busy"]),
        speed_legend=_legend(
            [
                "int8, over the fastest dense way",
                "fp32, over the fastest dense way",
                "fp32, over dense packed by blockgate in fp32",
                "ideal: 1 / density",
            ],
            _LINES,
        ),
        distribution_chart=distribution_chart(gated),
        distribution_legend=_legend(["always on", "input dependent", "always off"], _BOXES),
        trace_chart=trace_chart(trace),
        trace_label=escape(trace.label),
        method="\n".join(f"<li>{escape(line)}</li>" for line in _method(numbers)),
        facts="\n".join(f"<dt>{escape(n)}</dt><dd>{escape(str(v))}</dd>" for n, v in _facts(numbers).items()),
        program=escape(numbers["program"]),
        runs=escape(shlex.quote(str(folder / "runs"))),
        version=escape(__version__),
    )


def _warning(numbers: dict[str, Any]) -> str:
    if not numbers["quick"]:
        return ""
    return (
        '<p class="warning">This was a quick run: tiny models, hardly trained and hardly timed. It shows that '
        "everything works, and nothing else.</p>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(numbers: dict[str, Any]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in HEAD)
    lines = []
    for one, (label, *cells) in zip(numbers["speeds"], table_rows(numbers), strict=True):
        kind = ' class="baseline"' if f"{one['label']} / {one['engine']}" == numbers["fastest_dense"] else ""
        body = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr{kind}><th scope="row">{escape(label)}</th>{body}</tr>')
    rows = "\n".join(lines)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


# What stands beside the names of a legend.
_LINES = (
    '<path class="line l0" d="M1 9H33"/><circle class="mark l0" cx="17" cy="9" r="4"/>',
    '<path class="line l1" d="M1 9H33"/><rect class="mark l1" x="13" y="5" width="8" height="8"/>',
    '<path class="line l2" d="M1 9H33"/><path class="mark l2" d="M17 4l5 9h-10z"/>',
    '<path class="ideal" d="M1 9H33"/>',
)
_BOXES = tuple(
    f'<rect class="{kind}" x="8" y="1" width="18" height="16"/>'
    for kind in ("always-on", "input-dependent", "always-off")
)


def _legend(names: list[str], signs: tuple[str, ...]) -> str:
    lines = [
        f'<li><svg viewBox="0 0 34 18" aria-hidden="true">{sign}</svg>{escape(name)}</li>'
        for name, sign in zip(names, signs, strict=False)
    ]
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _method(numbers: dict[str, Any]) -> list[str]:
    """How each number came about, a sentence or two each."""
    run, model = numbers["run"], numbers["run"]["model"]
    gate, train = model["gate"], numbers["corpus"]["train"]
    test, (height, width) = numbers["corpus"]["test"], gate["block_size"]
    return [
        f"Text: the topics of help() and docstrings of the standard library of this Python, {train['words']:,} words "
        f"for training, {test['words']:,} for the test, {numbers['corpus']['vocabulary']:,} different ones; rare words "
        "count as <unk>. No sentence is in two parts. Another version of Python has another text.",
        f"Models: embedding {model['embedding_size']}, {model['num_layers']} LSTM layer(s) of {model['hidden_size']}, "
        f"projection and dense decoder over all words, which is part of every figure. Gates read {gate['key_size']} "
        f"features, blocks are {height} x {width} (outputs x inputs), gates of the kind {gate['gate']!r}, selection "
        f"is {gate['select'].replace('_', ' ')}.",
        f"Training: {run['epochs']} epoch(s) with {run['optimizer']['kind'].capitalize()}, learning rate "
        f"{run['optimizer']['lr']:g}, the same for all models and tuned for none; sparsity rises from epoch "
        f"{run['ramp']['begin']:g} to {run['ramp']['end']:g}. One seed, {numbers['seed']}: small differences in "
        "perplexity mean nothing.",
        "Perplexity: over all test words, of exactly the model that is timed, so int8 rows show what rounding "
        "costs. ONNX Runtime runs single words only here, so its perplexity is not measured. The curves are drawn on "
        f"some {CURVE_WORDS:,} words of validation text.",
        "Multiply-adds: for one token, gates and decoder included, with the share of open blocks as measured on the "
        "test text. “Open” is the share of the recurrent weights that a word meets; rounding to whole blocks makes it "
        "differ from what was asked.",
        "Time: the median over single calls, each reading the next word of the test text with the state carried on; "
        "all models take turns within one run, so that other work on the machine affects them alike. If others "
        "use more than a quarter of a core that the models need, or slow calls (p90) take more than twice as long "
        "as fast ones (p10), no ratio is shown. Before timing, packed float32 models were required to give the outputs "
        "of the trained ones, and int8 models to come close.",
        "Speed-up: over the fastest way to run the dense model, whichever that is here: torch in float32 and in int8 "
        "(its dynamic quantisation), ONNX Runtime if it is installed, or the dense model packed by blockgate. oneDNN "
        "packs the weights of an LSTM again on every call, so torch in float32 is timed with and without it.",
    ]


def _facts(numbers: dict[str, Any]) -> dict[str, Any]:
    """Where, with what and how it ran."""
    return {
        "command": numbers["command"],
        "seed": numbers["seed"],
        **numbers["machine"],
        "whole demo": f"{numbers['seconds']:.0f} seconds",
    }
