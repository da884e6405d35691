"""The result of the demo in words: the gated model against the fastest dense one, or that times can't be trusted."""

from __future__ import annotations

from typing import Any

__all__ = ["UNRELIABLE", "quality_sentence", "speed_cell", "speed_sentence", "times"]

UNRELIABLE = "machine busy: times unreliable"


def quality_sentence(numbers: dict[str, Any]) -> str:
    """Work and perplexity of the sparsest model, beside those of the dense one."""
    dense, sparse = numbers["arms"][0], numbers["arms"][-1]
    return (
        f"With {sparse['density']:.0%} of the recurrent weights open, the model does "
        f"{sparse['macs'] / dense['macs']:.0%} of the dense model's multiply-adds and reaches a test perplexity of "
        f"{sparse['test_perplexity']:.1f} (dense: {dense['test_perplexity']:.1f})."
    )


def speed_sentence(numbers: dict[str, Any]) -> str:
    """The sparsest model's fastest way against the fastest dense one; no ratio if the machine was busy."""
    if numbers["busy"]:
        return f"{UNRELIABLE} ({numbers['busy']}). Close other programs and run the demo again."
    sparse = numbers["arms"][-1]["name"]
    ours = _fastest([one for one in numbers["speeds"] if one["model"] == sparse])
    dense = [one for one in numbers["speeds"] if one["model"] == numbers["arms"][0]["name"]]
    best = _fastest(dense)
    sentence = (
        f"Its fastest version ({ours['engine']}) runs at {times(best['seconds'] / ours['seconds'])} the speed of the "
        f"fastest dense one ({best['engine']})."
    )
    in_float = [[one for one in group if "fp32" in one["engine"]] for group in (numbers["speeds"], dense)]
    ours = _fastest([one for one in in_float[0] if one["model"] == sparse])
    best = _fastest(in_float[1])
    return (
        f"{sentence} In float32 it runs at {times(best['seconds'] / ours['seconds'])} the speed of the fastest dense "
        f"one ({best['engine']})."
    )


def speed_cell(numbers: dict[str, Any], row: dict[str, Any]) -> str:
    """The speed-up of a row of the table over the fastest dense model."""
    return "busy" if numbers["busy"] else times(row["speedup"])


def times(ratio: float) -> str:
    """A ratio such as 1.52x, with two digits however small it is."""
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda one: float(one["seconds"]))
