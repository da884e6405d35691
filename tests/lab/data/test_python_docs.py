"""The corpus of Python's own documentation: always there, always the same, and its parts have nothing in common."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter

from blockgate.lab.data import load_corpus
from blockgate.lab.data.corpus import END_OF_SENTENCE, UNKNOWN
from blockgate.lab.data.python_docs import _sentences, python_docs
from tests.helpers import raises_blockgate


def test_parts_have_no_sentence_in_common():
    parts = python_docs(rare=0)
    sentences = [sentence for lines in parts.values() for sentence in lines]
    assert len(set(sentences)) == len(sentences)
    tokens = {part: sum(len(line.split()) for line in lines) for part, lines in parts.items()}
    assert tokens["train"] > 50_000
    assert all(tokens[part] > 4_000 for part in ("valid", "test"))


def test_it_is_english():
    words = Counter(word for line in python_docs()["train"] for word in line.split())
    assert {"the", "a", "is", "of"} <= {word for word, _ in words.most_common(20)}
    assert not any(">" in word for word in words if word != UNKNOWN)


def test_rare_words_of_the_training_text_are_unknown_everywhere():
    whole, parts = python_docs(rare=0), python_docs(rare=7)
    counts = Counter(word for line in whole["train"] for word in line.split())
    for part, lines in parts.items():
        for before, after in zip(whole[part], lines, strict=True):
            expected = [word if counts[word] >= 7 else UNKNOWN for word in before.split()]
            assert after.split() == expected


def test_another_process_without_network_reads_the_same():
    code = """
import hashlib, socket, sys
def refuse(*_): raise AssertionError("network")
socket.socket.connect = refuse
before = set(sys.modules)
from blockgate.lab.data.python_docs import python_docs
lines = python_docs()
assert not {"ftplib", "smtplib", "wsgiref", "doctest"} & (set(sys.modules) - before), "imported"
print(hashlib.sha256(repr(lines).encode()).hexdigest())
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_it_loads_as_a_corpus(monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    corpus = load_corpus("python-docs")
    assert {END_OF_SENTENCE, UNKNOWN, "the"} <= set(corpus.vocabulary.words)
    for part, lines in python_docs().items():
        assert corpus.lines[part] == len(lines)
        assert len(corpus.parts[part]) == sum(len(line.split()) + 1 for line in lines)


def test_a_python_without_documentation_is_told(monkeypatch):
    _sentences.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with raises_blockgate("data set 'python-docs'"):
        load_corpus("python-docs")


def test_its_name_is_among_those_of_a_wrong_one():
    with raises_blockgate("python-docs"):
        load_corpus("python-doc")
