"""`advise`: what pays on this machine, layer by layer and in total, before anything is trained.

`calls` sees what a model asks of its layers, `measure` times ways to do it, `store` remembers the times, `conclusions`
draws them, and `advising` is the call that does all of it.
"""

from blockgate.inspect.advice.advising import FORMATS, advise
from blockgate.inspect.advice.conclusions import Advice, LayerAdvice

__all__ = ["FORMATS", "Advice", "LayerAdvice", "advise"]
