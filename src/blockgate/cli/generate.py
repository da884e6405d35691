"""`blockgate generate`: text from a trained language model, word by word."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from blockgate.cli.output import use_threads
from blockgate.convert import pack
from blockgate.errors import invalid
from blockgate.lab.bench.checks import PACKED_TYPES
from blockgate.lab.models import LanguageModel
from blockgate.lab.models.sampling import sample
from blockgate.lab.models.softmax import FullSoftmax
from blockgate.lab.training import load_trained

__all__ = ["Generate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Writes text with a trained language model, and says how fast it was.

    The model is packed for inference first. The text goes to stdout as it is written, the speed to stderr; with --json
    both come as one object at the end.

    For example:
        blockgate generate runs/half --words 50 --seed 3
        blockgate generate runs/half --prompt "the stock market" --temperature 0.7 --top-k 40
        blockgate generate runs/half --packed int8 --json
    """

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Folder of a run (its best checkpoint is used), or a checkpoint file."""
    prompt: str = ""
    """First words; they must be in the vocabulary."""
    words: int = 100
    """How many words to write."""
    temperature: float = 1.0
    """Below 1 prefers likelier words, above 1 rarer ones; 0 always takes the likeliest."""
    top_k: int | None = None
    """Choose only among the k likeliest words."""
    seed: int = 0
    """The same seed writes the same text."""
    packed: Literal["fp32", "bf16", "int8", "no"] = "fp32"
    """How to store the weights; `no` runs the model as it was trained."""
    output_layer: Literal["auto", "screened", "dense"] = "auto"
    """How to find the likeliest words: screened looks at few of them, and finds the same. It keeps the layer's weights
    in fp32. auto: screened where temperature is 0 or --top-k is given."""
    threads: int | None = None
    """CPU threads. Default: torch's own number."""
    json: bool = False
    """Print JSON, for scripts."""

    def run(self) -> None:
        """Streams the words."""
        use_threads(self.threads)
        trained = load_trained(self.checkpoint)
        if not isinstance(trained.model, LanguageModel) or trained.vocabulary is None:
            raise invalid(
                "checkpoint",
                expected="a language model",
                got=f"{trained.file} with {type(trained.model).__name__}",
                remedy="Give a run of ptb, wikitext-2 or a text of your own.",
            )
        screened = self._is_screened(trained.model)
        model = self._packed(trained.model, screened=screened)
        begin, written = time.perf_counter(), []
        for word in sample(
            model,
            trained.vocabulary,
            prompt=self.prompt.split(),
            words=self.words,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
        ):
            written.append(word)
            if not self.json:
                print(word, end="\n" if word == "<eos>" else " ", flush=True)
        speed = len(written) / (time.perf_counter() - begin)
        if self.json:
            facts = {"checkpoint": str(trained.file), "prompt": self.prompt, "seed": self.seed, "packed": self.packed}
            facts["output_layer"] = "screened" if screened else "dense"
            print(json.dumps(facts | {"words": written, "words_per_second": speed}, indent=2))
        else:
            print(f"\n{len(written)} words, {speed:.0f} words/s", file=sys.stderr)

    def _is_screened(self, model: LanguageModel) -> bool:
        """Whether the output layer becomes a screened one."""
        wanted = self.output_layer == "screened"
        if wanted and (not isinstance(model.softmax, FullSoftmax) or self.packed == "no"):
            raise invalid(
                "--output-layer screened",
                expected="a packed model whose output layer scores every word",
                got="--packed no" if self.packed == "no" else "an adaptive softmax",
                remedy="Use --output-layer auto.",
            )
        few = self.temperature == 0 or self.top_k is not None
        fits = isinstance(model.softmax, FullSoftmax) and self.packed != "no"
        return wanted or (self.output_layer == "auto" and few and fits)

    def _packed(self, model: LanguageModel, *, screened: bool) -> LanguageModel:
        if self.packed == "no":
            return model
        packed = pack(model, PACKED_TYPES[self.packed], screened="softmax.decoder" if screened else ())
        return cast("LanguageModel", packed)
