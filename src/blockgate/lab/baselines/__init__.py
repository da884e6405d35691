"""What dynamic sparseness is compared with: magnitude pruning, and blocks that are closed for good."""

import importlib
import pkgutil

from blockgate.lab.baselines.inference import to_block_inference, to_sparse_inference
from blockgate.lab.baselines.matrices import MATRICES, Matrices
from blockgate.lab.baselines.pruning import MagnitudePruner, prunable_weights
from blockgate.lab.baselines.static import StaticBlockLinear, StaticBlockLSTM, StaticBlockQRNN

__all__ = [
    "MATRICES",
    "MagnitudePruner",
    "Matrices",
    "StaticBlockLSTM",
    "StaticBlockLinear",
    "StaticBlockQRNN",
    "prunable_weights",
    "to_block_inference",
    "to_sparse_inference",
]

# A file in this folder registers its kind of matrices by being there.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
