"""What dynamic sparseness is compared with: magnitude pruning, and blocks that are closed for good."""

from blockgate.lab.baselines.inference import to_block_inference, to_sparse_inference
from blockgate.lab.baselines.pruning import MagnitudePruner, prunable_weights
from blockgate.lab.baselines.static import StaticBlockLinear, StaticBlockLSTM, StaticBlockQRNN

__all__ = [
    "MagnitudePruner",
    "StaticBlockLSTM",
    "StaticBlockLinear",
    "StaticBlockQRNN",
    "prunable_weights",
    "to_block_inference",
    "to_sparse_inference",
]
