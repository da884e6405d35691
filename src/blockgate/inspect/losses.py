"""Losses a training loop may add: gates that use all blocks, and gates that agree from one token to the next."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockgate.errors import InvalidInputError, invalid
from blockgate.find import named_gates
from blockgate.gates import Gate
from blockgate.grid import as_int
from blockgate.inspect.hooks import watch
from blockgate.inspect.together import Average

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GateLosses", "gate_losses"]

# Scores that are all the same have no change to speak of: 0 / this is 0.
SMALLEST_VARIANCE = 1e-12


@contextmanager
def gate_losses(model: nn.Module, *, shared: bool = False) -> Iterator[GateLosses]:
    """Collects what the gates of `model` see inside a `with` block, for losses that shape them.

        with bg.inspect.gate_losses(model) as losses:
            y = model(x)
        loss = task_loss(y) + 0.1 * losses.balance()

    Scores are computed a second time, those of closed blocks included, so that these get gradients too. The results of
    the model stay the same. For a loss on some layers alone, pass these instead of the whole model.

    Args:
        model: any module with gated layers.
        shared: whether the batch is that of all processes of a data-parallel run. Losses are then those of the whole
            batch, with gradients that are right once they are averaged over processes. Every process must ask for the
            same losses.
    """
    losses = GateLosses(named_gates(model), shared=shared)
    with watch(losses._gates, losses._see):
        yield losses


class GateLosses:
    """Scores and decisions of every gate inside a block; see `gate_losses`."""

    def __init__(self, gates: dict[str, Gate], *, shared: bool = False) -> None:
        self._gates = gates
        self._average = Average() if shared else None
        self._scores: dict[str, list[Tensor]] = {}
        self._open_counts: dict[str, Tensor] = {}

    def balance(self) -> Tensor:
        """How unevenly blocks are used, averaged over gates: 1 if all equally often, more where few do all the work.

        The load-balancing loss of mixtures of experts: num_blocks * sum(f * p), where f is the share of all openings
        that falls to a block and p its share of the softmax of the scores, both averaged over the batch. Gradients flow
        through p. A gate that chooses in every row of blocks is balanced within each row; a sigmoid gate, which has
        every block open, is an error.
        """
        return torch.stack([self._balance_of(name, scores) for name, scores in self._collected()]).mean()

    def locality(self, steps: int, *, batch_first: bool = False) -> Tensor:
        """How much scores change from one token to the next, averaged over gates.

        Half the mean square of the change, as a share of the variance of the scores over the batch: 0 if they never
        change within a sequence, 1 if neighbours differ as much as any two tokens do. Neither the scale of the scores
        matters nor what is the same for all inputs, so a gate gains nothing by ignoring its input.

        Args:
            steps: tokens in a sequence. The rows that a gate saw are, in order, (steps, batch).
            batch_first: they are (batch, steps), as for a linear layer on (batch, steps, features). Recurrent layers
                of blockgate work time first inside, whatever they are given.
        """
        length = as_int(steps)
        if length is None or length < 2:
            raise invalid("steps", expected="2 tokens or more", got=steps, remedy="Pass the length of the sequences.")
        changes = [_change(name, s, length, batch_first, self._average) for name, s in self._collected()]
        return torch.stack(changes).mean()

    def _see(self, name: str, gate: Gate, x: Tensor, values: Tensor, indices: Tensor) -> None:
        if not len(x) and self._average is None:
            return
        # What scores need in the backward pass is kept as it is: activation checkpointing, which may surround the gate,
        # would want to compute it again, where nobody looks on.
        with torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is):
            self._scores.setdefault(name, []).append(gate.choices(x))
        counts = self._open_counts.get(name, values.new_zeros(gate.grid.num_blocks, dtype=torch.int64))
        self._open_counts[name] = counts.scatter_add(0, indices.flatten(), (values != 0).flatten().long())

    def _collected(self) -> list[tuple[str, Tensor]]:
        """All scores (rows, groups, size) of every gate that saw rows."""
        if not self._scores:
            raise invalid("gate losses", expected="rows seen in the block", got="none", remedy="Call the model inside.")
        return [(name, torch.cat(scores)) for name, scores in self._scores.items()]

    def _balance_of(self, name: str, choices: Tensor) -> Tensor:
        counts, average = self._open_counts[name], self._average
        try:
            share, used = self._gates[name].use(choices, counts if average is None else average.total(counts))
        except InvalidInputError as error:
            raise InvalidInputError(f"layer {name!r}: {error}") from error
        if average is not None:
            share, used = (average(value, len(choices)) for value in (share, used))
        return choices.shape[-1] * (used * share).sum(-1).mean()


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _change(name: str, scores: Tensor, steps: int, batch_first: bool, average: Average | None) -> Tensor:
    """Half the mean square change of scores (rows, groups, size) between neighbours, relative to their variance."""
    if len(scores) % steps:
        raise invalid(
            "steps",
            expected=f"a length that divides the {len(scores)} rows of {name}",
            got=steps,
            remedy="All sequences of a batch have one length.",
        )
    # A shift of all scores of a choice changes no decision.
    relative = scores - scores.mean(-1, keepdim=True)
    time = 1 if batch_first else 0
    tokens = relative.view(*((-1, steps) if batch_first else (steps, -1)), *scores.shape[1:])
    change = tokens.diff(dim=time).square().mean((0, 1))
    if average is None:
        spread = relative.var(0, correction=0)
    else:
        # The gradient through the mean is 0 over the whole batch, though not over the share of a process.
        centre = average(relative.mean(0), len(scores)).detach()
        spread = average((relative - centre).square().mean(0), len(scores))
        change = average(change, len(scores))
    return change.sum() / (2 * spread.sum().clamp(min=SMALLEST_VARIANCE))
