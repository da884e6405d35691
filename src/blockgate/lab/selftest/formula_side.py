"""A problem's numbers, and what the formula makes of them."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockgate.lab.selftest import formula, recurrences
from blockgate.lab.selftest.formula import Choice, GateParameters
from blockgate.lab.selftest.grids import cut_of, rule_of
from blockgate.lab.selftest.judge import Findings
from blockgate.lab.selftest.library import Built, autocast
from blockgate.lab.selftest.library_steps import library_layer
from blockgate.lab.selftest.norms import norm_scores
from blockgate.lab.selftest.numbers import Array, Number, Tape
from blockgate.lab.selftest.paired import paired_mlp
from blockgate.lab.selftest.steps import stepped
from blockgate.lab.selftest.stored import decoded, format_of, most_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from blockgate.gates import Gate
    from blockgate.lab.selftest.problems import Problem

__all__ = ["FormulaSide"]


class FormulaSide:
    """A problem's numbers, and the formula's results for them.

    Args:
        problem: what is solved.
        built: the library's layer, of which values and choices are read.
        findings: where near ties are counted.
        before: buffers as they were before a training pass, for gates that moved them afterwards.
        packed: a packed copy whose stored weights take the place of the layer's.
    """

    def __init__(
        self, problem: Problem, built: Built, findings: Findings, before: dict[str, Tensor], packed: Any = None
    ) -> None:
        self.problem, self.built, self.findings, self.before = problem, built, findings, before
        self.dtype = getattr(torch, problem.dtype)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.half = self.dtype is not wide
        self.eps = torch.finfo(wide).eps
        self.tape = Tape(self.eps)
        self.packed = dict(packed.named_modules()) if packed is not None else {}
        self.leaves: dict[str, Number] = {}
        self.gates: dict[str, Number] = {}
        self.stored: dict[str, Array] = {}
        self.parameters = dict(built.layer.named_parameters())
        self.buffers = dict(built.layer.named_buffers())

    def run(self) -> dict[str, Number]:
        """Outputs by name, as rows."""
        problem = self.problem
        x = self.leaf("x", self.built.x)
        if problem.layer in {"linear", "conv1d"}:
            y = self._product("", x, self.built.x)
            return {"y": self.narrow(y)}
        if problem.layer == "mlp":
            return {"y": self.narrow(paired_mlp(self, x))}
        if problem.layer == "qrnn":
            return self._run_qrnn(x)
        return self._run_stack(x)

    def _run_stack(self, x: Number) -> dict[str, Number]:
        problem, tape = self.problem, self.tape
        state = self.built.state
        if state is None:
            shape = (problem.layers * problem.directions, problem.rows, problem.out)
            state = (torch.zeros(shape, dtype=self.dtype),) * (1 if problem.layer.startswith("gru") else 2)
        starts = [self.leaf(name, s) for name, s in zip(("h0", "c0"), state, strict=False)]
        step = recurrences.gru_step if problem.layer.startswith("gru") else recurrences.lstm_step
        alive, order = self.built.alive, recurrences.turned(self.built.alive)
        rows, last = self.built.x, []
        for index in range(problem.layers):
            outputs, seen = [], []
            for number in range(index * problem.directions, (index + 1) * problem.directions):
                backwards = number % problem.directions == 1
                suffix = "" if problem.is_cell else f"_l{index}{'_reverse' if backwards else ''}"
                own = tuple(s[number : number + 1] for s in state)
                read = library_layer(self, suffix, rows[order] if backwards else rows, own)
                begin = tuple(tape.shaped(tape.rows(s, number, number + 1), own[0].shape[1:]) for s in starts)
                visits = iter(read.states)

                def of_input(
                    x: Number, suffix: str = suffix, rows: Tensor = rows, backwards: bool = backwards
                ) -> Number:
                    sums = self._product(f"ih{suffix}", x, rows)
                    return tape.ordered(sums, order) if backwards else sums

                def of_state(h: Number, suffix: str = suffix, visits: Any = visits) -> Number:
                    return self._product(f"hh{suffix}", h, next(visits))

                y, end = recurrences.layer(tape, x, alive, begin, of_input, of_state, step)
                # Turned twice, rows are as before.
                outputs.append(tape.ordered(y, order) if backwards else y)
                seen.append(read.output[order] if backwards else read.output)
                last.append(end)
            x = self._handed_on(outputs[0] if len(outputs) == 1 else tape.join(outputs, 1))
            rows = torch.cat(seen, 1)
        ends = [tape.join(list(parts), 0) for parts in zip(*last, strict=True)]
        return {"y": self.narrow(x) if problem.is_stack else x} | dict(zip(("h_n", "c_n"), ends, strict=False))

    @contextmanager
    def as_before(self, gate: Any, path: str) -> Iterator[None]:
        """With the running means that a recurrent gate had before it was told what it had decided on."""
        now = {name: buffer.clone() for name, buffer in gate.named_buffers()}
        with torch.no_grad():
            for name, buffer in gate.named_buffers():
                if "hh" in path and f"{path}.{name}" in self.before:
                    buffer.copy_(self.before[f"{path}.{name}"])
            yield
            for name, buffer in gate.named_buffers():
                buffer.copy_(now[name])

    def _run_qrnn(self, x: Number) -> dict[str, Number]:
        problem, tape, layer = self.problem, self.tape, self.built.layer
        windows: list[Tensor] = []
        filters: Any = layer.filters
        modules = [self.packed.get(f"filters.{i}", f) for i, f in enumerate(filters)]
        hooks = [m.register_forward_pre_hook(lambda _, args: windows.append(args[0].flatten(0, 1))) for m in modules]
        training = layer.training
        layer.eval()
        whole = self.packed.get("", layer)
        # As it was called: without autocast the windows of a second layer are others, and its gates may choose others.
        with torch.no_grad(), autocast(problem):
            whole(self.built.x.view(problem.steps, problem.rows, problem.inputs))
        layer.train(training)
        for hook in hooks:
            hook.remove()
        found: dict[str, Number] = {}
        for index, seen in enumerate(windows):
            state = tape.leaf(np.zeros((problem.rows, problem.out)))
            product = partial(self._product, f"filters.{index}", seen=seen)
            x, state = recurrences.qrnn_layer(
                tape, x, problem.steps, state, product, window=problem.window, pooling=problem.pooling
            )
            x = self._handed_on(x)
            found[f"c_{index}"] = state
        return {"y": x} | found

    def _product(self, name: str, x: Number, seen: Tensor) -> Number:
        """The gated product of one matrix, named as in the layer ("", "ih_l0", "filters.0"), and its bias."""
        layer: Any = self.built.layer
        if name.startswith("filters"):
            owner, names = layer.filters[int(name[8:])], ("weight", "bias", "gate")
            path = {what: f"{name}.{what}" for what in names}
        elif name:
            owner, path = layer, {what: f"{what}_{name}" for what in ("weight", "bias", "gate")}
        else:
            owner, path = layer, {what: what for what in ("weight", "bias", "gate")}
        gate: Gate = getattr(owner, path["gate"].rpartition(".")[2])
        if self.packed and gate.kind == "norm" and not hasattr(self.packed[name], "columns"):
            # It goes by the weights that are stored.
            gate = self.packed[name].gate
            self.stored[path["weight"]] = decoded(self.packed[name])[0]
        self.tape.unit = self.eps
        gates = self.gates.get(path["gate"])
        if gates is None:
            gates = self.gates_of_rows(gate, path, x, seen)
            if not name:
                self.gates[path["gate"]] = gates
        parameters = self.parameters
        tape, cut = self.tape, cut_of(gate)
        if self.packed:
            module = self.packed[name]
            weight = tape.leaf(decoded(module)[0])
            # Columns are multiplied as float.
            x = x if hasattr(module, "columns") else stepped(tape, x, cut, format_of(module))
        else:
            weight = self.leaf(path["weight"], parameters[path["weight"]])
            if self.problem.layer == "conv1d":
                weight = tape.swapped(weight, 0, 1)
        bias = self.leaf(path["bias"], parameters[path["bias"]]) if path["bias"] in parameters else None
        y = formula.gated_product(
            tape, self.wide(x), self.wide(weight), None if bias is None else self.wide(bias), gates, cut
        )
        if self.packed and self.problem.is_recurrent:
            # Before sigmoids: a sum that rounding leaves unknown by 10 may be off by all of it, and would not show.
            with torch.no_grad():
                found = self.packed[name](seen)
            kind = f"sums {format_of(self.packed[name])}"
            self.findings.compare(self.problem, f"{kind} of {name}", found, y.pair, kind)
        if (self.problem.autocast and self.problem.layer == "qrnn") or (self.half and self.problem.is_recurrent):
            # Products give a narrow type, and what follows is computed in it, or better.
            y = self.narrow(y)
            tape.unit = torch.finfo(self._narrow_type()).eps
        return y

    def gates_of_rows(self, gate: Any, paths: dict[str, str], x: Number, seen: Tensor) -> Number:
        """All gates (N, blocks) for x, whose value in the library is `seen`; paths name weight, bias and gate."""
        tape, state, buffers, path = self.tape, self.parameters, self.buffers, paths["gate"]
        rule, cut = rule_of(gate), cut_of(gate)
        if rule.kind == "norm":
            matrix = self.stored.get(paths["weight"])
            if matrix is None:
                matrix = state[paths["weight"]].detach().double().numpy()
                matrix = matrix.T if self.problem.layer == "conv1d" else matrix
            return self._gates_of_scores(norm_scores(tape, x, matrix, cut), rule, cut, gate, path, seen)
        if "hh" in path and self.before:
            # The recurrent gate is told of its input after it has decided.
            buffers = buffers | self.before

        def number(name: str) -> Number | None:
            tensor = state.get(f"{path}.{name}", buffers.get(f"{path}.{name}"))
            return None if tensor is None else self.wide(self.leaf(f"{path}.{name}", tensor), means=True)

        weight, bias = number("weight"), number("bias")
        assert weight is not None
        assert bias is not None
        parts = [number(n) for n in ("hidden_weight", "hidden_bias", "key_mean", "hidden_mean")]
        scores = formula.scores_of(
            tape, self.wide(x), GateParameters(weight, bias, *parts), rule, torch.finfo(self.dtype).eps
        )
        return self._gates_of_scores(scores, rule, cut, gate, path, seen)

    def _gates_of_scores(
        self, scores: Number, rule: formula.GateRule, cut: formula.Cut, gate: Any, path: str, seen: Tensor
    ) -> Number:
        choice = Choice(self._library_scores(gate, path, seen))
        gates = formula.gates_of(self.tape, scores, rule, cut, choice)
        self.findings.near_ties += choice.near_ties
        return gates

    def _library_scores(self, gate: Any, path: str, seen: Tensor) -> Array:
        """The scores by which the library chose."""
        if gate.kind != "norm":
            seen = seen.to(torch.promote_types(seen.dtype, gate.weight.dtype))
        with torch.no_grad(), self.as_before(gate, path):
            scores: Array = gate.scores(seen).double().numpy()
        return scores

    def check_stored(self) -> None:
        """Whether packed weights are as near to the layer's as their format says."""
        parameters = self.parameters
        for name, module in self.packed.items():
            if not (hasattr(module, "packed") or hasattr(module, "columns")):
                continue
            own = (
                f"{name}.weight"
                if name.startswith("filters") or self.problem.layer == "mlp"
                else f"weight_{name}"
                if name
                else "weight"
            )
            weight = parameters[own].detach().double().numpy()
            weight = weight.T if self.problem.layer == "conv1d" else weight
            stored, step = decoded(module)
            kind = format_of(module)
            self.findings.compare(
                self.problem,
                f"stored as {kind}",
                torch.from_numpy(stored),
                (weight, most_error(module, weight, step) + 2.0**-23 * np.abs(weight)),
                f"stored {kind}",
            )

    def leaf(self, name: str, tensor: Tensor) -> Number:
        """An input or parameter; one number for each name, so that its gradients add up."""
        if name not in self.leaves:
            self.leaves[name] = self.tape.leaf(tensor.detach().double().numpy())
        return self.leaves[name]

    def wide(self, a: Number, *, means: bool = False) -> Number:
        """In float32: exact, but the gradient is rounded on its way back."""
        del means
        if not self.half:
            return a
        limits = torch.finfo(self.dtype)
        return self.tape.cast(a, limits.eps, limits.smallest_normal)

    def narrow(self, a: Number) -> Number:
        """Rounded to the layer's or autocast's type on the way out."""
        kind = self._narrow_type()
        if kind in {torch.float32, torch.float64}:
            return a
        limits = torch.finfo(kind)
        return self.tape.cast(a, limits.eps, limits.smallest_normal, forward=True)

    def _handed_on(self, a: Number) -> Number:
        """What a layer of narrow type hands on to the next: below its smallest number there is nothing left."""
        limits = torch.finfo(self._narrow_type())
        if not self.half and not (self.problem.autocast and self.problem.layer == "qrnn"):
            return a
        # Operations already carry errors in units of eps.
        return self.tape.cast(a, 0.0, limits.smallest_normal * limits.eps, forward=True)

    def _narrow_type(self) -> torch.dtype:
        narrow: torch.dtype = getattr(torch, self.problem.autocast) if self.problem.autocast else self.dtype
        return narrow
