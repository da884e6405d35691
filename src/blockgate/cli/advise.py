"""`blockgate advise`: which layers of a model are worth gates on this machine, measured before any training."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from torch import nn

from blockgate.cli.output import use_threads
from blockgate.errors import BlockgateError, invalid, missing_extra
from blockgate.inspect.advice import FORMATS, advise

__all__ = ["Advise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advise:
    """Says which layers of a model to gate, with which blocks, in which format, and what the whole model gains.

    Every layer is timed on this machine with random inputs of the sizes that an example gives it. Let nothing else
    run meanwhile. Times are kept on disk: the second call is quick.

    For example:
        blockgate advise my_package.models:make_model
        blockgate advise path/to/saved-transformer --tokens 1 --sparsity 0.9
        blockgate advise my_package.models:make_model --json > advice.json
    """

    model: Annotated[str, tyro.conf.Positional]
    """PACKAGE.MODULE:FUNCTION that returns a model and an example input, or a folder that transformers'
    save_pretrained wrote."""
    sparsity: float = 0.75
    """The level to plan for: 0.5, 0.75 or 0.9."""
    formats: tuple[str, ...] = FORMATS
    """Formats that weights may be packed to. The fastest one is advised. Default: all."""
    tokens: int = 1
    """For a text model from a folder: how many tokens it reads at a time."""
    threads: int | None = None
    """CPU threads. Default: torch's own number."""
    again: bool = False
    """Ignore times measured before."""
    seconds: float = 30.0
    """About how long to time layers; preparing them takes as long again."""
    json: bool = False
    """Print JSON, for scripts."""

    def run(self) -> None:
        """Measures and prints the advice."""
        use_threads(self.threads)
        folder = Path(self.model)
        model, example = _from_folder(folder, self.tokens) if folder.is_dir() else _from_function(self.model)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("measuring layers", total=None)
            advice = advise(
                model,
                example,
                sparsity=self.sparsity,
                formats=self.formats,
                again=self.again,
                seconds=self.seconds,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        print(json.dumps(advice.to_dict(), indent=2) if self.json else advice)


def _from_function(name: str) -> tuple[nn.Module, Any]:
    module, colon, function = name.partition(":")
    expected = "PACKAGE.MODULE:FUNCTION, or a folder that save_pretrained wrote"
    if not (module and colon and function):
        raise invalid("model", expected=expected, got=name, remedy="See: blockgate advise --help")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise invalid("model", expected=expected, got=f"{name} ({error})", remedy="Check the name.") from error
    finally:
        sys.path.remove(os.getcwd())
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise invalid(
            name,
            expected="a function that returns a model and an example input",
            got=type(made).__name__,
            remedy="return model, torch.zeros(1, 512)",
        )
    return made


def _from_folder(folder: Path, tokens: int) -> tuple[nn.Module, Any]:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("a model from a folder", error) from None
    if tokens < 1:
        raise invalid("tokens", expected="at least 1", got=tokens, remedy="One token is decoding.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, AttributeError) as error:
        raise BlockgateError(f"{folder}: not a model that transformers can load ({error})") from error
    return model, _example(folder, model, tokens)


def _example(folder: Path, model: Any, tokens: int) -> dict[str, torch.Tensor]:
    """One row of what a model of transformers reads: some tokens, or a picture."""
    config = model.config
    if model.main_input_name == "input_ids":
        words = torch.zeros(1, tokens, dtype=torch.long)
        return {"input_ids": words, "decoder_input_ids": words} if config.is_encoder_decoder else {"input_ids": words}
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return {
            "pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        }
    raise invalid(
        str(folder),
        expected="a model that reads input_ids, or pictures of one size",
        got=f"{type(model).__name__}, which reads {model.main_input_name}",
        remedy="Write a function that returns the model and an example input: PACKAGE.MODULE:FUNCTION.",
    )
