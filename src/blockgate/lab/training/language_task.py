"""The task of a language model: predict the next word."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from blockgate.errors import invalid
from blockgate.lab.data import Vocabulary, load_corpus
from blockgate.lab.data.batches import cut_columns, equal_segments, varied_segments
from blockgate.lab.models import LanguageModel
from blockgate.lab.models.language_model import detach
from blockgate.lab.training.checkpoint import load_trained
from blockgate.lab.training.config import LanguageModelRun
from blockgate.lab.training.task import ALONE, Share, Step, Task, epoch_generator, sha256_of

__all__ = ["LanguageTask"]


class LanguageTask(Task):
    """Predict the next word.

    Args:
        run: its config.
        share: what this process takes.
        vocabulary: that of a trained model; None for that of the training text.
    """

    score, unit = "perplexity", "tokens"

    def __init__(self, run: LanguageModelRun, share: Share = ALONE, vocabulary: Vocabulary | None = None) -> None:
        self.run, self.share = run, share
        self.corpus = load_corpus(run.data, run.data_dir, vocabulary=vocabulary)
        if run.bptt < 1:
            raise invalid("bptt", expected="at least 1 word", got=run.bptt, remedy="The paper uses 35.")
        self.train = self._columns("train", run.batch_size, keep_all=False)
        self.teacher = _teacher(run)

    def _columns(self, part: str, columns: int, *, keep_all: bool) -> tuple[Tensor, Tensor]:
        inputs, targets = cut_columns(self.corpus.parts[part], columns, keep_all=keep_all)
        return inputs[:, self.share.rank :: self.share.world], targets[:, self.share.rank :: self.share.world]

    def make_model(self) -> nn.Module:
        """A fresh language model over the vocabulary."""
        return LanguageModel(self.run.model, len(self.corpus.vocabulary))

    def plan(self, epoch: int) -> list[Any]:
        """Segments, one after the other."""
        steps = len(self.train[0])
        if not self.run.varied_bptt:
            return list(equal_segments(steps, self.run.bptt))
        return list(varied_segments(steps, self.run.bptt, epoch_generator(self.run.seed, epoch)))

    def learn(self, model: nn.Module, batch: Any, carried: Any, device: torch.device) -> Step:
        """Mean loss over the words of a segment, and activation regularisation."""
        start, length = batch
        # A new epoch starts at the beginning of the text, with an empty state.
        carried, of_teacher = (None, None) if start == 0 else carried
        words, targets = (part[start : start + length].to(device) for part in self.train)
        predicted = None
        if self.teacher is not None:
            with torch.no_grad():
                predicted, of_teacher = self.teacher.to(device)(words, of_teacher)
        losses = model.loss(words, targets, carried, predicted)  # type: ignore[operator]
        loss = losses.per_word.mean()
        if losses.against_teacher is not None:
            loss = torch.lerp(loss, losses.against_teacher.mean(), self.run.distil)
        if self.run.activation_l2:
            loss = loss + self.run.activation_l2 * losses.dropped_output.pow(2).mean()
        if self.run.slowness and length > 1:
            loss = loss + self.run.slowness * (losses.output[1:] - losses.output[:-1]).pow(2).mean()
        sums = _sums(losses.per_word.detach().sum(), words.numel())
        return Step(loss, sums, (detach(losses.carried), of_teacher))

    def restore(self, model: nn.Module, carried: Any) -> Any:
        """The states of the model and of its teacher."""
        if carried is None:
            return None
        return tuple(
            one.own_states(states) if isinstance(one, LanguageModel) else states
            for one, states in zip((model, self.teacher), carried, strict=True)
        )

    def lr_scale(self, batch: Any) -> float:
        """Shorter segments move less."""
        return batch.length / self.run.bptt if self.run.varied_bptt else 1.0

    def evaluate(self, model: nn.Module, part: str, device: torch.device, most: int | None = None) -> Tensor:
        """Sum of losses, and words; every word but the first counts once."""
        inputs, targets = self._columns(part, self.run.eval_batch_size, keep_all=True)
        sums, carried = _sums(torch.zeros((), device=device), 0), None
        for start, length in equal_segments(len(inputs), self.run.bptt)[:most]:
            words, next_words = (t[start : start + length].to(device) for t in (inputs, targets))
            losses = model.loss(words, next_words, carried)  # type: ignore[operator]
            carried = losses.carried
            sums += _sums(losses.per_word.sum(), int((next_words >= 0).sum()))
        return sums

    def single_inputs(self, part: str, count: int) -> list[Tensor]:
        """Words (1, 1)."""
        return list(self.corpus.parts[part][:count].view(-1, 1, 1))

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Loss in nats per word, and perplexity."""
        loss = float(sums[0] / sums[-1])
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def fingerprint(self) -> str:
        """Of the three parts."""
        return sha256_of(*self.corpus.parts.values())

    def model_facts(self) -> dict[str, Any]:
        """The words."""
        return {"vocabulary": list(self.corpus.vocabulary.words)}


def _teacher(run: LanguageModelRun) -> nn.Module | None:
    """The model to learn from, in eval mode."""
    if not 0 <= run.distil <= 1 or (run.distil and run.start is None):
        raise invalid(
            "distil",
            expected="a share in [0, 1], and --start",
            got=run.distil,
            remedy="Give a trained run to learn from.",
        )
    return load_trained(run.start).model if run.distil and run.start is not None else None


def _sums(loss: Tensor, count: int) -> Tensor:
    return torch.stack([loss.double(), torch.tensor(float(count), dtype=torch.float64, device=loss.device)])
