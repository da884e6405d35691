"""The two files of a checkpoint: written whole or not at all, and checked before anything is believed."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from blockgate._version import __version__
from blockgate.checkpoint.atomic import replace_whole, system_errors
from blockgate.checkpoint.layers import check_described
from blockgate.errors import BlockgateError, InvalidInputError, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["fingerprint", "read_checkpoint", "write_checkpoint"]

FORMAT = "blockgate"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

# What a config holds besides format and versions, and of which type.
_FIELDS: dict[str, Any] = {
    "gates_only": bool,
    "constructor": (str, type(None)),
    "constructor_options": dict,
    "layers": dict,
    "ties": dict,
    "dense_sha256": (str, type(None)),
    "weights_sha256": str,
}


def write_checkpoint(directory: str | os.PathLike[str], config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes config and weights. The config holds the weights' digest: a pair that doesn't belong together is refused.

    Args:
        directory: made if it isn't there; an older checkpoint in it is replaced.
        config: what JSON can hold.
        tensors: contiguous CPU tensors that share no memory.
    """
    safetensors = _safetensors()
    folder = Path(directory)
    _check_target(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # First the weights take their place, then the config, which knows their digest.
    with replace_whole(folder / CONFIG_FILE) as config_file, replace_whole(folder / WEIGHTS_FILE) as weights_file:
        with system_errors(folder / WEIGHTS_FILE):
            safetensors.save_file(tensors, weights_file, metadata={"format": "pt"})
        versions = {"format": FORMAT, "format_version": FORMAT_VERSION, "blockgate_version": __version__}
        whole = {**versions, **config, "weights_sha256": _file_digest(weights_file)}
        config_file.write_text(json.dumps(whole, indent=2) + "\n")


def read_checkpoint(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a checkpoint, or a clear error that says what is wrong with it."""
    safetensors = _safetensors()
    folder = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise invalid(
                f"checkpoint {str(folder)!r}",
                expected=f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}",
                got=f"no {name}",
                remedy="Save it with save_pretrained.",
            )
    config = _read_config(folder / CONFIG_FILE)
    digest = _file_digest(folder / WEIGHTS_FILE)
    if digest != config["weights_sha256"]:
        config = _left_config(folder, digest) or config
    if digest != config["weights_sha256"]:
        raise invalid(
            str(folder / WEIGHTS_FILE),
            expected=f"the file that {CONFIG_FILE} was written with",
            got="another, or a damaged one",
            remedy="Copy the folder again, or save it again.",
        )
    try:
        return config, safetensors.load_file(folder / WEIGHTS_FILE)
    except Exception as error:
        # The digest fits, so that this is what somebody wrote.
        raise invalid(
            str(folder / WEIGHTS_FILE),
            expected="tensors as safetensors stores them",
            got=" ".join(str(error).split())[:200],
            remedy="Load a folder that save_pretrained wrote, unchanged.",
        ) from error


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """One digest for names, types, shapes and values of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        size = tensor.numel() * tensor.element_size()
        if size:
            digest.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
    return digest.hexdigest()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise _bad_config(path, "JSON", str(error)) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise _bad_config(path, "a checkpoint of blockgate", "something else")
    if config.get("format_version") != FORMAT_VERSION:
        raise invalid(
            str(path),
            expected=f"format version {FORMAT_VERSION}",
            got=config.get("format_version"),
            remedy=f"It was written by blockgate {config.get('blockgate_version')}; this is {__version__}.",
        )
    for name, kind in _FIELDS.items():
        if not isinstance(config.get(name), kind):
            raise _bad_config(path, f"a valid {name!r}", config.get(name))
    for key, kept in config["ties"].items():
        if not isinstance(kept, str):
            raise _bad_config(path, f"the name of what {key!r} is tied to", kept)
    check_described(config["layers"])
    return config


def _left_config(folder: Path, digest: str) -> dict[str, Any] | None:
    """The config of these weights that a writer has not put in its place yet, or never did, since it was killed."""
    for path in sorted(folder.glob(f".{CONFIG_FILE}.*")):
        try:
            config = _read_config(path)
        except (InvalidInputError, OSError):
            continue
        if config["weights_sha256"] == digest:
            return config
    return None


def _bad_config(path: Path, expected: str, got: object) -> InvalidInputError:
    return invalid(str(path), expected=expected, got=got, remedy="Load a folder that save_pretrained wrote, unchanged.")


def _check_target(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise invalid("directory", expected="a folder", got=str(folder), remedy="There is a file of that name.")
    path = folder / CONFIG_FILE
    if path.exists():
        try:
            ours = json.loads(path.read_text()).get("format") == FORMAT
        except (ValueError, AttributeError):
            ours = False
        if not ours:
            raise invalid(
                "directory",
                expected=f"no {CONFIG_FILE} from another program",
                got=str(path),
                remedy="Save to a folder of its own.",
            )


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise BlockgateError(
            "checkpoints: expected the package safetensors, got none. Install it with pip install 'blockgate[train]'."
        ) from error
    return safetensors.torch
