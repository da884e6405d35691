"""The computation: gate scores, selection, the gated block product, and recurrences around it.

Symbols: N rows of input; a weight W of m x n cut into r x c blocks; S = r * c scores a row; E compact gates a row,
each a value and the index of its block (row-major in the grid). A gate of value 0 is closed: its block is not read,
adds nothing, and receives no gradient. NaN or inf anywhere in a row of input makes all of its outputs NaN.

    s = FF(key(h))                              gate_scores
    G = normalise(topk(ReLU(s)))                topk_gates
    y = (G expanded to blocks * W) h + bias     gated_linear

Every op has a folder: `op.py` registers it with torch (schema, shapes, gradient), and `reference.py` computes it in
plain PyTorch, slow and obvious; `triton.py`, where there is one, launches the GPU kernels. The reference judges every
kernel, and serves where there is none. Forward references are differentiable as they stand, so their gradients judge
the written-out backward functions.
"""

from blockgate.ops import native as native  # loads the compiled kernels
from blockgate.ops.backend import BACKENDS, check_backend, check_device, describe_auto, describe_gpu
from blockgate.ops.gate_scores import gate_scores
from blockgate.ops.gated_linear import gated_linear
from blockgate.ops.topk_gates import NORMALISE, topk_gates

__all__ = [
    "BACKENDS",
    "NORMALISE",
    "check_backend",
    "check_device",
    "describe_auto",
    "describe_gpu",
    "gate_scores",
    "gated_linear",
    "topk_gates",
]
