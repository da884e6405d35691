"""Models changed as a whole: `sparsify_` gates their layers, `regroup` sorts their channels before that,
`calibrate` and `reconstruct` bring back what it cost, and `pack` makes inference copies."""

from blockgate.convert.calibrate import calibrate
from blockgate.convert.pack import pack
from blockgate.convert.reconstruct import reconstruct
from blockgate.convert.regroup import regroup
from blockgate.convert.report import LayerReport, SparsifyReport
from blockgate.convert.sparsify import sparsify_

__all__ = [
    "LayerReport",
    "SparsifyReport",
    "calibrate",
    "pack",
    "reconstruct",
    "regroup",
    "sparsify_",
]
