"""The models of the experiments: word language models, and the network for MNIST."""

from blockgate.models.costs import Costs, count_costs, small_dense
from blockgate.models.image_network import ImageNetwork, ImageNetworkConfig
from blockgate.models.language_model import LanguageModel, LanguageModelConfig
from blockgate.models.matrices import MATRICES, GateConfig

__all__ = [
    "MATRICES",
    "Costs",
    "GateConfig",
    "ImageNetwork",
    "ImageNetworkConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "count_costs",
    "small_dense",
]
