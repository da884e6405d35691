"""Deliberate faults, each with the tests that must notice it. `make mutants` tries them all.

A fault replaces `old` by `new` inside of `within`, a piece of text that occurs once in its file. In native code both
are expressions of the same type: all of those are built at once, and a variable of the environment chooses one.
"""

from __future__ import annotations

from tests.mutants import newer, recurrent
from tests.mutants.mutant import REPLACED, SELFTEST, Mutant
from tests.mutants.mutant import native as _native
from tests.mutants.mutant import python as _python

__all__ = ["MUTANTS", "Mutant"]

NATIVE = [
    # Selection.
    _native(
        "isa/topk.h",
        "chosen |= equal & -equal;",
        "equal & -equal",
        "uint64_t(1) << (63 - __builtin_clzll(equal))",
    ),
    _native("isa/topk.h", "equal && threshold.ties > 0;", "threshold.ties > 0", "true"),
    _native(
        "isa/topk.h",
        "return ceil_div(count, L) * L + horizontal_sum<K>(below + below2);",
        "ceil_div(count, L) * L",
        "count",
        "tests/ops/test_kernels.py",
        SELFTEST,
    ),
    _native("isa/topk.h", "__builtin_sqrt(m.squares / double(scores))", "double(scores)", "1.0"),
    _native("isa/topk.h", "? gates[i] * mean_dot : mean_dot;", "gates[i] * mean_dot", "mean_dot"),
    _native(
        "isa/topk.h",
        "(largest < 0x1p-400 || largest > 0x1p400)",
        "largest < 0x1p-400",
        "false",
        "tests/ops/test_extremes.py",
    ),
    _native(
        "isa/topk.h",
        "(largest < 0x1p-400 || largest > 0x1p400)",
        "largest > 0x1p400",
        "false",
        "tests/ops/test_extremes.py",
    ),
    _native(
        "isa/margin.h",
        "return runner_up - T(margin_floor(spec.normalise, spec.open_blocks, spec.scores / spec.groups));",
        "runner_up - T(margin_floor(spec.normalise, spec.open_blocks, spec.scores / spec.groups))",
        "runner_up",
    ),
    _native("isa/margin.h", "grad_scores[runners[g]] -= T(total);", "T(total)", "T(0)"),
    _native("isa/margin.h", "grad_scores[g * group + highest] += T(step);", "T(step)", "T(0)"),
    _native(
        "host/select.h",
        "open_blocks <= scores / groups,",
        "open_blocks <= scores / groups",
        "open_blocks <= scores / groups + 1",
        "tests/ops/test_extremes.py",
    ),
    # Cells and recurrences.
    _native("isa/cell.h", "load_some(args.before + at, n), i * g);", "i * g", "i * o"),
    _native("isa/cell.h", "one - tanh_c * tanh_c, load_some", "one - tanh_c * tanh_c", "one"),
    _native(
        "host/recurrent.h",
        "indices[slot] < (row + 1) * grid.cols",
        "(row + 1) * grid.cols",
        "(row + 1) * grid.cols + 1",
    ),
    _native("host/recurrent.h", "step.bad[token] = !all_finite(", "!all_finite(", "false && !all_finite("),
    _native("bind/forget_pool.cpp", "+ (1 - ft[i]) * zt[i];", "(1 - ft[i]) * zt[i]", "zt[i]"),
    _native(
        "bind/forget_pool.cpp",
        "t ? c.data + at - shape.states() : c0.data;",
        "t ? c.data + at - shape.states() : c0.data",
        "t ? c.data + at : c0.data",
    ),
    # Products.
    _native("isa/quantise.h", "largest_bits < bits ? bits", "largest_bits < bits", "k == 0"),
    _native(
        "isa/quantise.h",
        'steps[k] = 0;\n    return __builtin_nanf("");\n  }\n  float largest;',
        '__builtin_nanf("")',
        "1.0f",
    ),
    _native(
        "isa/stream_integers.h",
        "open[i].gate * args.quantised.size[col];",
        "args.quantised.size[col]",
        "args.quantised.size[0]",
    ),
    _native(
        "isa/weight_grad.h",
        "accumulate ? load(target) + tile.acc[m][j] : tile.acc[m][j]",
        "accumulate ? load(target) + tile.acc[m][j] : tile.acc[m][j]",
        "tile.acc[m][j]",
        "tests/ops/test_kernels.py",
        SELFTEST,
    ),
    _native(
        "host/prepared.cpp",
        "hidden[i] = hidden[i] <= 0 ? 0 : hidden[i];",
        "hidden[i] <= 0 ? 0 : hidden[i]",
        "hidden[i]",
    ),
    _native("host/prepared.cpp", "const float* key = x + gate.key_offset;", "gate.key_offset", "int64_t(0)"),
    _native(
        "host/bad_rows.h",
        "bad |= Bits((bits & EXPONENT) == EXPONENT);",
        "(bits & EXPONENT) == EXPONENT",
        "(bits & EXPONENT) > EXPONENT",
    ),
    # Formats.
    _native("host/format_int8.cpp", "stored[k / 2 * 2 * PANEL + k % 2] = int8_t", "k % 2", "1 - k % 2"),
    _native("host/format_int4.cpp", "half << 4 * (k % 2)", "(k % 2)", "((k + 1) % 2)"),
    _native(
        "host/format_bfloat16.cpp", "(bits + 0x7fff + ((bits >> 16) & 1))", "((bits >> 16) & 1)", "1u", "tests/formats"
    ),
    _native(
        "host/format_float16.cpp",
        "Half(weight[k]).x",
        "weight[k]",
        "weight[k] * 0.9999f",
        "tests/formats/test_formats.py",
    ),
    # Checks, and what runs where.
    _native(
        "bind/groups.h",
        "key[0] <= inputs - key[1]",
        "key[0] <= inputs - key[1]",
        "int64_t(uint64_t(key[0]) + uint64_t(key[1])) <= inputs + 1",
        "tests/ops/test_extremes.py",
    ),
    _native(
        "host/tensors.h",
        "block_out <= MOST && block_in <= MOST",
        "block_out <= MOST",
        "true",
        "tests/ops/test_extremes.py",
    ),
    _native(
        "host/grouping.h",
        "if (uint64_t(block) >= uint64_t(num_blocks)) return",
        "uint64_t(block) >= uint64_t(num_blocks)",
        "uint64_t(block) > uint64_t(num_blocks)",
        "tests/ops/test_registered.py",
        "tests/ops/test_kernels.py",
        "tests/ops/test_extremes.py",
    ),
    _native("host/parallel.h", "return forked() ? 1 :", "forked()", "false", "tests/runtime/test_fork.py"),
]

STALE, PACKED_STALE = "tests/runtime/test_staleness.py", "tests/runtime/test_packed_staleness.py"

PYTHON = [
    _python("grid.py", "+ 0.5 + 1e-9)", "+ 0.5)", "tests/test_grid.py"),
    _python("grid.py", "if number > MOST:", "if number > 1 << 63:", "tests/ops/test_extremes.py"),
    _python(
        "ops/topk_gates/reference.py", "(kept + first).flatten(1)", "kept.flatten(1)", "tests/ops/test_reference.py"
    ),
    _python("ops/topk_gates/reference.py", "grad = (grad - divisor)", "grad = grad", "tests/ops/test_reference.py"),
    _python(
        "ops/topk_gates/reference.py",
        "moved = -kept.view",
        "moved = kept.view",
        "tests/gates/test_margin.py",
        "tests/ops/test_reference.py",
    ),
    _python(
        "ops/gated_linear/reference.py",
        "(gate * grad[rows, outs]).T",
        "grad[rows, outs].T",
        "tests/ops/test_reference.py",
    ),
    _python(
        "ops/gated_linear/op.py",
        "grad.sum(0) if need_bias",
        "grad.mean(0) if need_bias",
        "tests/ops/test_registered.py",
    ),
    _python(
        "ops/gate_scores/op.py",
        "grad.T @ key if need_weight",
        "grad.T @ key.abs() if need_weight",
        "tests/ops/test_registered.py",
        SELFTEST,
    ),
    _python("gates/margin.py", "return bias - (weight", "return bias + (weight", "tests/gates/test_margin.py"),
    _python("gates/means.py", "MOMENTUM = 0.02", "MOMENTUM = 0.2", SELFTEST),
    _python("gates/means.py", "towards = towards.to(mean.dtype)\n", "pass\n", "tests/gates/test_half.py"),
    _python("gates/sigmoid.py", "logarithms.detach().amax(-1, keepdim=True)", "0", "tests/ops/test_extremes.py"),
    _python(
        "gates/softmax_sum.py",
        "return values * scale, indices",
        "return values, indices",
        "tests/gates/test_gates.py",
        SELFTEST,
    ),
    _python("formats/int4.py", "torch.where(halves > 7,", "torch.where(halves > 8,", "tests/formats"),
    _python("formats/int8.py", ".abs().amax(-1) / 127", ".abs().amax(-1) / 120", "tests/formats"),
    _python(
        "layers/qrnn.py",
        "torch.cat([last.unsqueeze(0), x[:-1]])",
        "torch.cat([x[:-1], last.unsqueeze(0)])",
        "tests/layers/test_qrnn.py",
    ),
    _python(
        "runtime/follow.py",
        "(address, t._version, _steps.get(address, 0))",
        "(address, 0, _steps.get(address, 0))",
        STALE,
    ),
    _python("runtime/follow.py", "_steps[address] += 1", "_steps[address] += 0", STALE, REPLACED),
    _python("runtime/linear.py", "type(gate), gate._spec, *gate", "type(gate), *gate", STALE, "tests/layers"),
    _python(
        "runtime/linear.py",
        "        self.repack()\n        super()._load_from_state_dict(*args)",
        "        super()._load_from_state_dict(*args)",
        REPLACED,
    ),
    _python("runtime/plan.py", '"key_of", "network", "scores"})', '"scores"})', REPLACED),
    _python(
        "runtime/packed.py",
        'return self.changes, cast("PackedBlocks", modules["packed"]).changes, cast("Gate", modules["gate"]).changes',
        "return (self.changes,)",
        PACKED_STALE,
    ),
    _python(
        "changes.py",
        "        super()._load_from_state_dict(*args)\n        self.count_change()",
        "        super()._load_from_state_dict(*args)",
        PACKED_STALE,
    ),
    _python(
        "checkpoint/files.py",
        'if digest != config["weights_sha256"]:\n        raise',
        "if False:\n        raise",
        "tests/checkpoint/test_faults.py",
    ),
    _python(
        "checkpoint/atomic.py",
        "        temporary.unlink(missing_ok=True)",
        "        pass",
        "tests/checkpoint/test_atomic.py",
    ),
    _python(
        "lab/training/loop.py", 'torch.set_rng_state(local["random"])', "pass", "tests/lab/training/test_resume.py"
    ),
    _python(
        "lab/training/loop.py",
        'self.learning_rate.load_state_dict(training["learning_rate"])',
        "pass",
        "tests/lab/training/test_resume.py",
    ),
    _python(
        "lab/training/loop.py",
        'load_optimizer(self.module, self.optimizer, training["optimizer"])',
        "pass",
        "tests/lab/training/test_resume.py",
    ),
    _python("schedule.py", "        self.move_to(steps)", "        pass", "tests/test_schedule.py"),
]

MUTANTS = [*NATIVE, *recurrent.NATIVE, *newer.NATIVE, *PYTHON, *recurrent.PYTHON, *newer.PYTHON]
