"""Models changed as a whole: `sparsify_` gates the layers of a model, `pack` makes its inference copy."""

from blockgate.convert.pack import pack
from blockgate.convert.report import LayerReport, SparsifyReport
from blockgate.convert.sparsify import sparsify_

__all__ = ["LayerReport", "SparsifyReport", "pack", "sparsify_"]
