"""Corpora and images: found, downloaded, checked and read."""

from blockgate.lab.data.corpus import Corpus, Vocabulary, load_corpus
from blockgate.lab.data.images import Images, load_images
from blockgate.lab.data.sources import SOURCES, data_dir, fetch, locate

__all__ = [
    "SOURCES",
    "Corpus",
    "Images",
    "Vocabulary",
    "data_dir",
    "fetch",
    "load_corpus",
    "load_images",
    "locate",
]
