"""The paper's network for MNIST: a dense input layer, square hidden layers, a dense output layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from blockgate.grid import check_size
from blockgate.lab.models.matrices import matrices
from blockgate.spec import GateSpec

__all__ = ["ImageNetwork", "ImageNetworkConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageNetworkConfig:
    """Sizes of the network, and the kind of its hidden matrices."""

    matrices: str = "dynamic"
    """Kind of the hidden layers: dense, dynamic or static."""
    hidden_size: int = 1024
    """Features of every hidden layer."""
    hidden_layers: int = 5
    """Square layers between input and output layer."""
    gate: GateSpec = field(default_factory=lambda: GateSpec(block_size=128, sparsity=0.9))
    """Options of dynamic and static matrices. If a ramp is set, sparsity rises to the one given here."""


class ImageNetwork(nn.Module):
    """Scores classes of images, with ReLU between layers.

    Args:
        config: sizes and kinds.
        pixels: of an image.
        classes: how many.
    """

    def __init__(self, config: ImageNetworkConfig, pixels: int = 784, classes: int = 10) -> None:
        super().__init__()
        size = check_size("hidden_size", config.hidden_size)
        kind = matrices(config.matrices)
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(pixels, size), nn.ReLU()]
        for _ in range(check_size("hidden_layers", config.hidden_layers)):
            layers += [kind.linear(size, size, **kind.options(config.gate)), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(size, classes))

    @property
    def matrix_layers(self) -> tuple[str, ...]:
        """Names of the layers whose kind the config decides."""
        return tuple(f"layers.{number}" for number in range(3, len(self.layers) - 1, 2))

    def forward(self, images: Tensor) -> Tensor:
        """Scores (N, classes) for images (N, ...) of floats."""
        scores: Tensor = self.layers(images)
        return scores
