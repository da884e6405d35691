"""Real English that every Python has, as the examples' data: the documentation of the language itself."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor


def words_of_python(vocabulary: int) -> tuple[Tensor, list[str]]:
    """The words of Python's documentation as indices, and the word of each index; 0 stands for all rare words."""
    words = re.findall(r"[a-z']+|[.,:;()]", " ".join(topics.values()).lower())
    names = ["<rare>", *(word for word, _ in Counter(words).most_common(vocabulary - 1))]
    index = {name: number for number, name in enumerate(names)}
    return torch.tensor([index.get(word, 0) for word in words]), names
