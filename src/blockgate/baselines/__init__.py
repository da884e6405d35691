"""What dynamic sparseness is compared with: magnitude pruning, and blocks that are closed for good."""

from blockgate.baselines.inference import to_block_inference, to_sparse_inference
from blockgate.baselines.pruning import MagnitudePruner, prunable_weights
from blockgate.baselines.static import StaticBlockLinear, StaticBlockLSTM, StaticBlockQRNN

__all__ = [
    "MagnitudePruner",
    "StaticBlockLSTM",
    "StaticBlockLinear",
    "StaticBlockQRNN",
    "prunable_weights",
    "to_block_inference",
    "to_sparse_inference",
]
