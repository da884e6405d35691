"""Deliberate faults in recurrent layers: cells, stacks, directions, packed sequences."""

from __future__ import annotations

from tests.mutants.mutant import REPLACED, native, python

__all__ = ["NATIVE", "PYTHON"]

LAYERS = ("tests/layers/test_recurrent.py", "tests/layers/test_recurrent_in_use.py")
OPS = "tests/ops/test_gated_recurrence.py"

NATIVE = [
    native(
        "isa/cell.h",
        "multiply_add(z, load_some(args.before + at, count) - n, n)",
        "load_some(args.before + at, count) - n",
        "load_some(args.before + at, count)",
        LAYERS[1],
    ),
    native("isa/cell.h", "2 * size + unit, grad_n * r, count);", "grad_n * r", "grad_n", OPS),
    native(
        "host/cell.h",
        "i == 0 || inputs[i].sums() != inputs[0].sums();",
        "inputs[i].sums() != inputs[0].sums()",
        "true",
        LAYERS[1],
    ),
    native("host/recurrent_stack.cpp", "(t ? c_n : c) : before", "(t ? c_n : c)", "c"),
    native(
        "host/recurrent_stack.cpp",
        "input_of(products[2 * l], l ? states.h_n + (l - 1) * state : x)",
        "l ? states.h_n + (l - 1) * state : x",
        "l ? states.h + (l - 1) * state : x",
    ),
]

PYTHON = [
    python("ops/gated_lstm/reference.py", "grad_c = grad_c * f\n", "grad_c = grad_c * i\n", OPS),
    python("ops/gated_gru/reference.py", "through_product + grad_h * z", "through_product", OPS),
    python(
        "runtime/recurrent.py",
        "        sums = turned(sums, segments)\n",
        "        sums = sums.flip(0)\n",
        LAYERS[0],
    ),
    python(
        "runtime/recurrent.py",
        "self.cell.give(_reorder(last, x.unsorted_indices))",
        "self.cell.give(_reorder(last, x.sorted_indices))",
        *LAYERS,
    ),
    python(
        "runtime/gated_recurrent.py",
        "        refusal = weights_refusal(self, names)\n",
        "        refusal = None\n",
        REPLACED,
    ),
    python(
        "runtime/gated_recurrent.py",
        'for name, gate in self._named_gates() for t in copied_of(parameters.get(f"weight_{name}"), gate)]',
        "for name, gate in self._named_gates() for t in copied_of(None, gate)]",
        *LAYERS,
        REPLACED,
    ),
]
