"""The exact top k of an output layer's scores, of which most are never computed; for inference only."""

from blockgate.ops.screened_topk.op import (
    count_survivors,
    prepare_screened,
    release_screened,
    run_screened_rank,
    run_screened_topk,
    screened_rank,
    screened_topk,
)
from blockgate.ops.screened_topk.screen import Screen, make_screen

__all__ = [
    "Screen",
    "count_survivors",
    "make_screen",
    "prepare_screened",
    "release_screened",
    "run_screened_rank",
    "run_screened_topk",
    "screened_rank",
    "screened_topk",
]
