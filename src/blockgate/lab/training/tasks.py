"""What a run learns: its data, its model, the loss of a batch, and how well a model does. The loop knows no more."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid
from blockgate.lab.data import Vocabulary, load_corpus, load_images
from blockgate.lab.data.batches import cut_columns, equal_segments, varied_segments
from blockgate.lab.models import ImageNetwork, LanguageModel
from blockgate.lab.models.language_model import detach
from blockgate.lab.models.softmax import at_least_float32
from blockgate.lab.training.checkpoint import load_trained
from blockgate.lab.training.config import ImageRun, LanguageModelRun, Run

__all__ = ["ImageTask", "LanguageTask", "Step", "Task", "make_task"]

# Images are shifted and scaled to mean 0 and deviation 1 over MNIST's training set.
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081


class Share(NamedTuple):
    """Which of how many processes this is: it takes every `world`-th column or image from `rank` on."""

    rank: int = 0
    world: int = 1


ALONE = Share()


class Step(NamedTuple):
    """A batch that has been through the model.

    Args:
        loss: for the backward pass; the average over processes is that of the whole batch.
        sums: what `Task.metrics` takes, for this process's share.
        carried: the state for the next batch.
    """

    loss: Tensor
    sums: Tensor
    carried: Any


class Task(ABC):
    """One thing to learn.

    `score` names the metric that chooses the best model, lower is better; `unit` is what sums count.
    """

    score: str
    unit: str

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A fresh model."""

    @abstractmethod
    def plan(self, epoch: int) -> list[Any]:
        """The batches of an epoch, in order; the same for the same epoch, whenever it is asked."""

    @abstractmethod
    def learn(self, model: nn.Module, batch: Any, carried: Any, device: torch.device) -> Step:
        """Loss of a batch in training."""

    def restore(self, model: nn.Module, carried: Any) -> Any:  # noqa: ARG002
        """What a checkpoint has as carried, in the form that `learn` takes."""
        return carried

    def lr_scale(self, batch: Any) -> float:  # noqa: ARG002
        """What this batch's learning rate is multiplied by."""
        return 1.0

    @abstractmethod
    def evaluate(self, model: nn.Module, part: str, device: torch.device, most: int | None = None) -> Tensor:
        """Sums over this process's share of "valid" or "test", or of its first `most` batches."""

    @abstractmethod
    def single_inputs(self, part: str, count: int) -> list[Tensor]:
        """The first inputs of a part, one by one, as a model at work would meet them."""

    @abstractmethod
    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Averages by name from sums; the last sum is the count of units."""

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the data as numbers: two runs with the same one have seen the same."""

    @abstractmethod
    def model_facts(self) -> dict[str, Any]:
        """What a checkpoint needs, beside the config, to make the model again."""


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
        return list(varied_segments(steps, self.run.bptt, _generator(self.run.seed, epoch)))

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
        return _sha256(*self.corpus.parts.values())

    def model_facts(self) -> dict[str, Any]:
        """The words."""
        return {"vocabulary": list(self.corpus.vocabulary.words)}


class ImageTask(Task):
    """Tell digits apart.

    Args:
        run: its config.
        share: what this process takes.
    """

    score, unit = "error", "images"

    def __init__(self, run: ImageRun, share: Share = ALONE) -> None:
        self.run, self.share = run, share
        images = load_images(run.data, run.data_dir)
        pixels, labels = images.train
        if not 0 < run.valid_size < len(pixels):
            raise invalid(
                "valid_size", expected=f"1 to {len(pixels) - 1}", got=run.valid_size, remedy="The default is 5000."
            )
        self.parts = {
            "train": (pixels[: -run.valid_size], labels[: -run.valid_size]),
            "valid": (pixels[-run.valid_size :], labels[-run.valid_size :]),
            "test": images.test,
        }
        self.classes = 1 + max(int(labels.max()), int(images.test[1].max()))

    def make_model(self) -> nn.Module:
        """A fresh network for images of this size."""
        return ImageNetwork(self.run.model, **self.model_facts())

    def fingerprint(self) -> str:
        """Of images and labels."""
        return _sha256(*(tensor for pair in self.parts.values() for tensor in pair))

    def model_facts(self) -> dict[str, Any]:
        """The size of an image, and how many classes there are."""
        return {"pixels": self.parts["train"][0][0].numel(), "classes": self.classes}

    def plan(self, epoch: int) -> list[Any]:
        """Numbers of the images of each batch, drawn again in each epoch."""
        order = torch.randperm(len(self.parts["train"][0]), generator=_generator(self.run.seed, epoch))
        return list(order.split(self.run.batch_size))

    def learn(self, model: nn.Module, batch: Any, carried: Any, device: torch.device) -> Step:
        """Mean loss over the images of a batch."""
        images, labels = self._pick("train", batch[self.share.rank :: self.share.world], device)
        scores = at_least_float32(model(images))
        losses = F.cross_entropy(scores, labels, reduction="sum")
        return Step(losses * self.share.world / len(batch), _image_sums(losses, scores, labels), carried)

    def evaluate(self, model: nn.Module, part: str, device: torch.device, most: int | None = None) -> Tensor:
        """Sum of losses, wrong answers, images."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for batch in torch.arange(len(self.parts[part][0])).split(self.run.eval_batch_size)[:most]:
            images, labels = self._pick(part, batch[self.share.rank :: self.share.world], device)
            scores = at_least_float32(model(images))
            sums += _image_sums(F.cross_entropy(scores, labels, reduction="sum"), scores, labels)
        return sums

    def single_inputs(self, part: str, count: int) -> list[Tensor]:
        """Images (1, height, width)."""
        return list(self._pick(part, torch.arange(count), torch.device("cpu"))[0].split(1))

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Loss, and the share of wrong answers."""
        return {"loss": float(sums[0] / sums[-1]), "error": float(sums[1] / sums[-1])}

    def _pick(self, part: str, numbers: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        images, labels = self.parts[part]
        pixels = images[numbers].to(device).float() / 255
        return (pixels - PIXEL_MEAN) / PIXEL_DEVIATION, labels[numbers].to(device)


def make_task(run: Run, share: Share = ALONE, vocabulary: Vocabulary | None = None) -> Task:
    """The task of a run."""
    if isinstance(run, ImageRun):
        return ImageTask(run, share)
    assert isinstance(run, LanguageModelRun)
    return LanguageTask(run, share, vocabulary)


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


def _image_sums(loss: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    wrong = (scores.argmax(dim=-1) != labels).sum()
    return torch.stack([loss.detach().double(), wrong.double(), wrong.new_tensor(len(labels)).double()])


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Random numbers of one epoch: a run that is resumed draws the same."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)
