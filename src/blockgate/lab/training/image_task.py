"""The task of an image network: tell digits apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockgate.errors import invalid
from blockgate.lab.data import load_images
from blockgate.lab.models import ImageNetwork
from blockgate.lab.models.softmax import at_least_float32
from blockgate.lab.training.config import ImageRun
from blockgate.lab.training.task import ALONE, Share, Step, Task, epoch_generator, sha256_of

__all__ = ["ImageTask"]

# Images are shifted and scaled to mean 0 and deviation 1 over MNIST's training set.
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307, 0.3081


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
        return sha256_of(*(tensor for pair in self.parts.values() for tensor in pair))

    def model_facts(self) -> dict[str, Any]:
        """The size of an image, and how many classes there are."""
        return {"pixels": self.parts["train"][0][0].numel(), "classes": self.classes}

    def plan(self, epoch: int) -> list[Any]:
        """Numbers of the images of each batch, drawn again in each epoch."""
        order = torch.randperm(len(self.parts["train"][0]), generator=epoch_generator(self.run.seed, epoch))
        return list(order.split(self.run.batch_size))

    def learn(self, model: nn.Module, batch: Any, carried: Any, device: torch.device) -> Step:
        """Mean loss over the images of a batch."""
        images, labels = self._pick("train", batch[self.share.rank :: self.share.world], device)
        scores = at_least_float32(model(images))
        losses = F.cross_entropy(scores, labels, reduction="sum")
        return Step(losses * self.share.world / len(batch), _sums(losses, scores, labels), carried)

    def evaluate(self, model: nn.Module, part: str, device: torch.device, most: int | None = None) -> Tensor:
        """Sum of losses, wrong answers, images."""
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for batch in torch.arange(len(self.parts[part][0])).split(self.run.eval_batch_size)[:most]:
            images, labels = self._pick(part, batch[self.share.rank :: self.share.world], device)
            scores = at_least_float32(model(images))
            sums += _sums(F.cross_entropy(scores, labels, reduction="sum"), scores, labels)
        return sums

    def single_inputs(self, part: str, count: int) -> list[Tensor]:
        """Images (1, height, width)."""
        return list(self.pixels(part, torch.arange(min(count, len(self.parts[part][0])))).split(1))

    def pixels(self, part: str, numbers: Tensor) -> Tensor:
        """Images of these numbers (N, height, width), as the model reads them."""
        return self._pick(part, numbers, torch.device("cpu"))[0]

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Loss, and the share of wrong answers."""
        return {"loss": float(sums[0] / sums[-1]), "error": float(sums[1] / sums[-1])}

    def _pick(self, part: str, numbers: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        images, labels = self.parts[part]
        pixels = images[numbers].to(device).float() / 255
        return (pixels - PIXEL_MEAN) / PIXEL_DEVIATION, labels[numbers].to(device)


def _sums(loss: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    wrong = (scores.argmax(dim=-1) != labels).sum()
    return torch.stack([loss.detach().double(), wrong.double(), wrong.new_tensor(len(labels)).double()])
