"""Real English that every Python has, as a corpus that needs no download: the documentation of the language itself."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from blockgate.errors import BlockgateError

__all__ = ["PYTHON_DOCS", "python_docs"]

# What `load_corpus` and `blockgate train --data` call it.
PYTHON_DOCS = "python-docs"

# Modules and packages whose docstrings are read: long ones, in every Python that we support and in no separate package.
MODULES = (
    *("_pydecimal", "_pyio", "argparse", "ast", "asyncio", "base64", "bdb", "calendar", "cmd", "code", "codecs"),
    *(
        "collections",
        "concurrent/futures",
        "configparser",
        "contextlib",
        "copy",
        "csv",
        "dataclasses",
        "difflib",
        "dis",
    ),
    *(
        "dis",
        "doctest",
        "email",
        "enum",
        "filecmp",
        "fileinput",
        "fnmatch",
        "fractions",
        "ftplib",
        "functools",
        "getopt",
    ),
    *("gettext", "glob", "gzip", "heapq", "hmac", "html", "http", "imaplib", "importlib", "inspect", "ipaddress"),
    *("json", "locale", "logging", "mailbox", "mimetypes", "multiprocessing", "numbers", "optparse", "os", "pdb"),
    *("pickle", "pkgutil", "platform", "plistlib", "poplib", "pprint", "profile", "pydoc", "queue", "random", "re"),
    *("sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "sqlite3", "ssl"),
    *("statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "trace"),
    *("traceback", "types", "typing", "unittest", "urllib", "uuid", "warnings", "wave", "weakref", "wsgiref", "xml"),
    *("xmlrpc", "zipapp", "zipfile", "zipimport"),
)

# Nearly all of them are docstrings. Parsing the sources would find exactly those, and take a hundred times as long.
TRIPLE_QUOTED = re.compile(r"(\"\"\"|''')(.*?)\1", re.DOTALL)
# Lower-case names with their dots and apostrophes, numbers, punctuation; all else is markup.
TOKEN = re.compile(r"[^\W\d]\w*(?:[.']\w+)*|\d+|[.,:;()!?]")
NUMBER = "N"
SENTENCE_END = re.compile(r"(?<=[.:!?])\s+(?=[\"'`*(]*[A-Z])")
# A paragraph of prose has one of these words, and ends as sentences do; code samples and grammar rarely do.
PROSE = re.compile(r"\b(?:the|a|an|of|to|this|be|are)\b", re.IGNORECASE)
CODE = re.compile(r">>>|::=|==|\s=\s|\(self\b|->")
SENTENCE_WORDS = range(4, 60)
# The least share of words among the tokens of a sentence; tables and samples of addresses have less.
LEAST_WORDS = 0.7

# Pieces of so many sentences go in turn to the parts, so that each has something of everything; of twelve, two are
# kept for validation and test.
PIECE = 40
TURN = ("train", "train", "train", "valid", "train", "train", "train", "train", "train", "test", "train", "train")


def python_docs(*, rare: int = 4, unknown: str = "<unk>") -> dict[str, list[str]]:
    """Sentences of Python's documentation, words between blanks, for train, valid and test; none occurs twice.

    The text is that of `help()`'s topics and of docstrings in the standard library, whose files are read, not imported.
    It is the same for the same version of Python; another one has other words.

    Args:
        rare: words that occur less often than this in the training text are replaced.
        unknown: what replaces them.
    """
    parts: dict[str, list[tuple[str, ...]]] = {"train": [], "valid": [], "test": []}
    for number, sentence in enumerate(_sentences()):
        parts[TURN[number // PIECE % len(TURN)]].append(sentence)
    counts = Counter(chain.from_iterable(parts["train"]))
    return {
        part: [" ".join(word if counts[word] >= rare else unknown for word in sentence) for sentence in sentences]
        for part, sentences in parts.items()
    }


@functools.cache
def _sentences() -> tuple[tuple[str, ...], ...]:
    """All sentences, each once, in the order of their first appearance. Topics repeat each other, and so do classes."""
    found: dict[tuple[str, ...], None] = {}
    for text in chain(_topics(), _docstrings()):
        for paragraph in re.split(r"\n\s*\n", text):
            if _is_prose(paragraph):
                for sentence in SENTENCE_END.split(paragraph):
                    words = tuple(NUMBER if word.isdigit() else word for word in TOKEN.findall(sentence.lower()))
                    if len(words) in SENTENCE_WORDS and sum(w[0].islower() for w in words) >= LEAST_WORDS * len(words):
                        found[words] = None
    return tuple(found)


def _is_prose(paragraph: str) -> bool:
    ends = paragraph.rstrip().endswith((".", ":", "!", "?", ".)"))
    return ends and PROSE.search(paragraph) is not None and CODE.search(paragraph) is None


def _topics() -> list[str]:
    """What `help()` says about the language."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise BlockgateError(
            f"data set {PYTHON_DOCS!r}: expected Python's documentation in pydoc_data.topics, got none. "
            "This Python was installed without it: use another one, or another data set."
        ) from None
    return [text for _, text in sorted(topics.items())]


def _docstrings() -> Iterator[str]:
    """The texts in triple quotes of the modules, module by module; what a Python lacks is left out."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        for file in (library / f"{name}.py", *sorted((library / name).glob("*.py"))):
            if file.is_file():
                yield from (text for _, text in TRIPLE_QUOTED.findall(file.read_text(encoding="utf-8")))
