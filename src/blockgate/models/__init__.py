"""The models of the experiments: word language models, and the network for MNIST."""

from blockgate.models.image_network import ImageNetwork, ImageNetworkConfig
from blockgate.models.language_model import LanguageModel, LanguageModelConfig
from blockgate.models.matrices import MATRICES, GateConfig

__all__ = ["MATRICES", "GateConfig", "ImageNetwork", "ImageNetworkConfig", "LanguageModel", "LanguageModelConfig"]
