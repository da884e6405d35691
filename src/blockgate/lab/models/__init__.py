"""The models of the experiments: word language models, and the network for MNIST."""

from blockgate.lab.models.costs import Costs, count_costs, small_dense
from blockgate.lab.models.image_network import ImageNetwork, ImageNetworkConfig
from blockgate.lab.models.language_model import LanguageModel, LanguageModelConfig

__all__ = [
    "Costs",
    "ImageNetwork",
    "ImageNetworkConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "count_costs",
    "small_dense",
]
