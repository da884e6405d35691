"""Images in the IDX format of MNIST, compressed or not."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blockgate.errors import invalid
from blockgate.lab.data.sources import SOURCES, locate

__all__ = ["Images", "load_images", "read_idx"]

UNSIGNED_BYTE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images (N, height, width), uint8, and their labels (N,), int64, for training and test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_images(name: str, folder: Path | str | None = None) -> Images:
    """MNIST, checked, or a folder of your own with the same four IDX files (with or without .gz).

    Args:
        name: "mnist", or the path of a folder.
        folder: the data folder for "mnist", see `data_dir`.
    """
    if name in SOURCES and name != "mnist":
        raise invalid("images", expected="'mnist' or a folder with its four files", got=name, remedy="Check the name.")
    files = locate(name, folder) if name in SOURCES else _own_files(Path(name))

    def pair(part: str) -> tuple[Tensor, Tensor]:
        images, labels = read_idx(files[f"{part}-images-idx3-ubyte"]), read_idx(files[f"{part}-labels-idx1-ubyte"])
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels) or not len(images):
            raise invalid(
                f"{part} images of {name}",
                expected="images (N, height, width) and as many labels (N,)",
                got=f"{tuple(images.shape)} and {tuple(labels.shape)}",
                remedy="Check that the four files belong together.",
            )
        return images, labels.long()

    return Images(train=pair("train"), test=pair("t10k"))


def read_idx(file: Path) -> Tensor:
    """The uint8 array in an IDX file; .gz is unpacked on the way."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise invalid(f"{file}", expected="a readable file", got=str(error), remedy="Get the file again.") from None
    dimensions = data[3] if len(data) >= 4 else 0
    header = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4))
    if data[:3] != bytes([0, 0, UNSIGNED_BYTE]) or not dimensions or len(data) != header + math.prod(shape):
        raise invalid(
            f"{file}",
            expected="an IDX file of unsigned bytes, as long as its header says",
            got=f"{len(data)} bytes that begin with {data[:4].hex() or 'nothing'}, shape {shape}",
            remedy="Get the file again.",
        )
    # A copy, because the bytes themselves are read-only.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header, count=math.prod(shape)).view(shape)


def _own_files(folder: Path) -> dict[str, Path]:
    files = {}
    for part in SOURCES["mnist"].files:
        copies = [copy for copy in (folder / part, folder / f"{part}.gz") if copy.is_file()]
        if not copies:
            raise invalid(
                "images",
                expected="'mnist' or a folder with its four IDX files",
                got=f"{folder}, without {part}[.gz]",
                remedy="Check the path.",
            )
        files[part] = copies[0]
    return files
