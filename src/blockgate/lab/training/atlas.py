"""What the gate atlas of a run shows: decisions over part of its data, by class, and those along one text."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blockgate.errors import invalid
from blockgate.grid import check_size
from blockgate.inspect import GateRecord, record_gates
from blockgate.lab.data.batches import cut_columns, equal_segments
from blockgate.lab.training.tasks import ImageTask, LanguageTask, make_task

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from blockgate.lab.training.checkpoint import Trained

__all__ = ["Tour", "read_history", "record_tour"]

# The most frequent words are the classes of a text; all others together are one more.
WORD_CLASSES = 24
OTHERS = "(all other words)"


class Tour(NamedTuple):
    """A record of part of the data, whose kept rows are those of `tokens`."""

    record: GateRecord
    tokens: list[str]
    class_names: list[str]


@torch.no_grad()
def record_tour(trained: Trained, part: str, *, rows: int, tokens: int, text: str | None = None) -> Tour:
    """Counts decisions over the first rows of a part, by word or label, and keeps those along a text or some images.

    Args:
        trained: a gated model, and the run that says on which data.
        part: "valid" or "test".
        rows: how many words or images to count.
        tokens: how many words or images to keep; ignored if there is a text.
        text: words to read instead of the beginning of the part.
    """
    check_size("rows", rows)
    check_size("tokens", tokens)
    task = make_task(trained.run, vocabulary=trained.vocabulary)
    if isinstance(task, LanguageTask):
        return _tour_of_text(trained, task, part, rows, tokens, text)
    assert isinstance(task, ImageTask)
    if text is not None:
        raise invalid("text", expected="a language model", got="an image network", remedy="Leave it out.")
    return _tour_of_images(trained, task, part, rows, tokens)


def _tour_of_text(trained: Trained, task: LanguageTask, part: str, rows: int, tokens: int, text: str | None) -> Tour:
    words, known = task.corpus.parts[part], task.corpus.vocabulary
    read = known.encode(text.split()) if text is not None else words[:tokens]
    if not len(read):
        raise invalid("text", expected="words", got=text, remedy="Leave it out for the beginning of the data.")
    inputs, targets = cut_columns(
        words[: rows + 1], min(task.run.eval_batch_size, rows, len(words) - 1), keep_all=False
    )
    classes, names = _word_classes(inputs, known.words)
    record, carried = record_gates(trained.model, coactivation=False), None
    with record, record.labelled(classes):
        for start, length in equal_segments(len(inputs), task.run.bptt):
            part_of = slice(start, start + length)
            carried = trained.model.loss(inputs[part_of], targets[part_of], carried).carried  # type: ignore[operator]
    with record_gates(trained.model, coactivation=False, trace=len(read)) as along:
        trained.model(read[:, None])
    return Tour(_with_trace(record, along), [known.words[number] for number in read.tolist()], names)


def _word_classes(inputs: Tensor, words: tuple[str, ...]) -> tuple[Tensor, list[str]]:
    """The class of every input, in the order in which gates see them, and the names of the classes."""
    counts = inputs.flatten().bincount(minlength=len(words))
    frequent = counts.argsort(descending=True, stable=True)[:WORD_CLASSES]
    frequent = frequent[counts[frequent] > 0]
    classes = torch.full((len(words),), len(frequent))
    classes[frequent] = torch.arange(len(frequent))
    return classes[inputs.flatten()], [*(words[number] for number in frequent.tolist()), OTHERS]


def _tour_of_images(trained: Trained, task: ImageTask, part: str, rows: int, tokens: int) -> Tour:
    images, labels = task.parts[part]
    classes = sorted(set(labels[:rows].tolist()))
    each = max(1, tokens // len(classes))
    # Some of each class, side by side, so that their overlaps can be seen at a glance.
    picked = torch.cat([(labels[:rows] == label).nonzero().flatten()[:each] for label in classes])
    record = record_gates(trained.model, coactivation=False)
    with record, record.labelled(labels[:rows]):
        for numbers in torch.arange(min(rows, len(images))).split(task.run.eval_batch_size):
            trained.model(task.pixels(part, numbers))
    with record_gates(trained.model, coactivation=False, trace=len(picked)) as along:
        trained.model(task.pixels(part, picked))
    return Tour(
        _with_trace(record, along),
        [str(label) for label in labels[picked].tolist()],
        list(map(str, range(task.classes))),
    )


def _with_trace(record: GateRecord, along: GateRecord) -> GateRecord:
    """Rows that were kept apart, so that they are not counted."""
    for name, gate in record.gates.items():
        gate.trace = along.gates[name].trace
    return record


def read_history(file: Path) -> list[dict[str, Any]]:
    """The rows of a run's epochs.csv that tell of gates; none where there is no such file."""
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        return [row for row in csv.DictReader(stream) if row.get("input_dependent") and row.get("always_open")]
