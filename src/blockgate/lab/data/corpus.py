"""Text for word language models: a vocabulary, and the three parts of a corpus as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from blockgate.errors import invalid
from blockgate.lab.data.python_docs import PYTHON_DOCS, python_docs
from blockgate.lab.data.sources import SOURCES, locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["END_OF_SENTENCE", "PARTS", "UNKNOWN", "Corpus", "Vocabulary", "load_corpus"]

END_OF_SENTENCE = "<eos>"
UNKNOWN = "<unk>"
PARTS = ("train", "valid", "test")


class Vocabulary:
    """Words and their numbers. `<eos>` ends a line; `<unk>` stands for every word that isn't here.

    Args:
        words: all different, `<eos>` and `<unk>` among them; a word's place is its number.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}
        if len(self._numbers) != len(self.words) or not {END_OF_SENTENCE, UNKNOWN} <= self._numbers.keys():
            raise invalid(
                "vocabulary",
                expected=f"different words with {END_OF_SENTENCE} and {UNKNOWN} among them",
                got=f"{len(self.words)} words, {len(self._numbers)} different",
                remedy="Use Vocabulary.of_text.",
            )

    @classmethod
    def of_text(cls, words: Iterable[str]) -> Vocabulary:
        """The words of a text, frequent ones first, as the adaptive softmax needs them; equals by first appearance."""
        counts = Counter(words)
        known = [word for word, _ in counts.most_common()]
        return cls(known + [word for word in (END_OF_SENTENCE, UNKNOWN) if word not in counts])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> Tensor:
        """Numbers (T,) of words."""
        unknown = self._numbers[UNKNOWN]
        return torch.tensor([self._numbers.get(word, unknown) for word in words], dtype=torch.int64)

    def __contains__(self, word: str) -> bool:
        return word in self._numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A text in numbers. `<eos>` ends every line.

    Attributes:
        vocabulary: its words.
        parts: the numbers (T,) of train, valid and test.
        lines: how many lines each part has.
        missing: share of the words of each part that the vocabulary lacks; they are read as `<unk>`.
    """

    vocabulary: Vocabulary
    parts: dict[str, Tensor]
    lines: dict[str, int]
    missing: dict[str, float]

    def statistics(self) -> dict[str, dict[str, int]]:
        """Lines, words and tokens (words and one `<eos>` per line), for each part and in total."""
        parts = {
            part: {"lines": self.lines[part], "words": len(tokens) - self.lines[part], "tokens": len(tokens)}
            for part, tokens in self.parts.items()
        }
        total = {what: sum(counts[what] for counts in parts.values()) for what in ("lines", "words", "tokens")}
        return parts | {"total": total}


def load_corpus(name: str, folder: Path | str | None = None, *, vocabulary: Vocabulary | None = None) -> Corpus:
    """A published corpus ("ptb", "wikitext-2"), checked, Python's own documentation ("python-docs"), or your own texts.

    Args:
        name: of the corpus, or the path of a folder with train.txt, valid.txt and test.txt: words between blanks,
            UTF-8, one sentence or paragraph a line.
        folder: the data folder for published corpora, see `data_dir`.
        vocabulary: that of a trained model; by default the words of the training text.
    """
    if name in SOURCES and not set(PARTS) <= SOURCES[name].files.keys():
        raise invalid(
            "corpus", expected="a data set of text", got=name, remedy=f"Use ptb, wikitext-2, {PYTHON_DOCS} or a folder."
        )
    if name == PYTHON_DOCS:
        texts = python_docs(unknown=UNKNOWN)
    else:
        files = locate(name, folder) if name in SOURCES else _own_files(Path(name))
        texts = {part: _read(files[part]) for part in PARTS}
    words = {part: [word for line in text for word in [*line.split(), END_OF_SENTENCE]] for part, text in texts.items()}
    known = Vocabulary.of_text(words["train"]) if vocabulary is None else vocabulary
    return Corpus(
        vocabulary=known,
        parts={part: known.encode(tokens) for part, tokens in words.items()},
        lines={part: len(text) for part, text in texts.items()},
        missing={part: sum(word not in known for word in tokens) / len(tokens) for part, tokens in words.items()},
    )


def _own_files(folder: Path) -> dict[str, Path]:
    files = {part: folder / f"{part}.txt" for part in PARTS}
    missing = [str(file) for file in files.values() if not file.is_file()]
    if missing:
        texts = [*(name for name, source in SOURCES.items() if "train" in source.files), PYTHON_DOCS]
        raise invalid(
            "corpus",
            expected=f"one of {texts} or a folder with train.txt, valid.txt and test.txt",
            got=f"{folder}, without {', '.join(missing)}",
            remedy="Check the path.",
        )
    return files


def _read(file: Path) -> list[str]:
    """Lines of a text; only a newline ends one, as in `wc -l`."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            f"{file}", expected="UTF-8 text", got=f"a bad byte at {error.start}", remedy="Convert the file to UTF-8."
        ) from None
    if not text.split():
        raise invalid(f"{file}", expected="words", got="an empty text", remedy="Training needs all three files.")
    return text.removesuffix("\n").split("\n")
