"""ReLU, selection and normalisation: scores to compact gates."""

from blockgate.ops.topk_gates.op import NORMALISE, topk_gates

__all__ = ["NORMALISE", "topk_gates"]
