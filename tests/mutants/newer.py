"""Faults of columns, norm gates, inputs in 8 bits, screened layers, and of what keeps runs and copies right."""

from __future__ import annotations

from tests.mutants.mutant import SELFTEST, native, python

__all__ = ["NATIVE", "PYTHON"]

ADAPTIVE = "tests/runtime/test_adaptive.py"
NORM, STALE = "tests/gates/test_norm.py", "tests/runtime/test_staleness.py"
COLUMNS, BYTES, SCREENED = (
    "tests/runtime/test_packed_columns.py",
    "tests/ops/test_packed_integers.py",
    "tests/ops/test_screened_topk.py",
)

NATIVE = [
    # Columns.
    native(
        "isa/columns.h",
        "scales ? scales[(panel + p) * PANEL / args.group] : 1.0f;",
        "(panel + p) * PANEL / args.group",
        "int64_t(0)",
        COLUMNS,
        SELFTEST,
    ),
    native(
        "isa/columns.h",
        "place.scales[open[c] * place.groups + panel / step] : 1.0f;",
        "panel / step",
        "int64_t(0)",
        COLUMNS,
        SELFTEST,
    ),
    native("isa/columns.h", "smaller(args.height - first, args.outputs", "args.height - first", "count", COLUMNS),
    native("isa/columns.h", "for (; i < args.count; ++i) add_columns<1>", "i < args.count", "false", COLUMNS),
    native("isa/columns.h", "const int up = panel % 2 ? 24 : 28;", "panel % 2", "panel * 0", COLUMNS),
    native(
        "bind/column_linear.cpp",
        "std::fabs(x[j]) * norms[i * inputs + j];",
        "norms[i * inputs + j]",
        "norms[j]",
        COLUMNS,
    ),
    native(
        "bind/column_linear.cpp",
        "const int64_t column = args.open[t * kept + k];",
        "args.open[t * kept + k]",
        "args.open[k]",
        COLUMNS,
    ),
    # Inputs in 8 bits.
    native("isa/quantise.h", "size = high / steps - low / steps;", "high / steps - low / steps", "high / steps", BYTES),
    native("isa/quantise.h", "const int32_t down = below < largest_steps", "below < largest_steps", "false", BYTES),
    native("isa/quads.h", "broadcast_key(-zero[m]) * load", "-zero[m]", "zero[m]", BYTES),
    # Screened output layers.
    native("isa/screen.h", "missed += difference * difference;", "difference * difference", "0.0", SCREENED),
    native("isa/screen.h", "known ? score - error : -infinite;", "score - error", "score + error", SCREENED),
    native("isa/screen.h", "multiply_add(double(row[k + i]), x[k + i], lanes[i]);", "x[k + i]", "x[i]", SCREENED),
    native("host/screen.cpp", "(first == second && a < b);", "a < b", "b < a", SCREENED),
    native(
        "host/screen.cpp",
        "(scan.scores[i] == score && scan.rows[i] < target);",
        "scan.rows[i] < target",
        "false",
        SCREENED,
    ),
    native("host/screen.cpp", "k >= 1 && k <= layer.count,", "k <= layer.count", "true", SCREENED),
    # Adaptive softmax.
    native(
        "host/adaptive.cpp", "if (scores[g] < likeliest.least()) break;", "scores[g] <", "scores[g] - 1 <", ADAPTIVE
    ),
    native("host/adaptive.cpp", "if (scores[g] < likeliest.least()) break;", "scores[g] <", "false &&", ADAPTIVE),
    native(
        "host/adaptive.cpp", "(a.value == b.value && a.word < b.word);", "a.word < b.word", "b.word < a.word", ADAPTIVE
    ),
    native("host/adaptive.cpp", "scores[g] + (y[word] - sum), word", "y[word] - sum", "y[word]", ADAPTIVE),
    native("host/packed.cpp", "const int64_t row = row_begin + i / parts", "row_begin + ", "", ADAPTIVE),
]

PYTHON = [
    python(
        "checkpoint/states.py",
        'not _fits(state.pop("digest", None), state)',
        "False",
        "tests/lab/training/test_damage.py",
        "tests/integrations/test_distil.py",
    ),
    python("integrations/distil.py", "if fabric.is_global_zero:", "if True:", "tests/integrations/test_distil.py"),
    python("runtime/follow.py", "if type(parameter) in {torch.Tensor, nn.Parameter}:", "if False:", STALE),
    python(
        "lab/training/launch.py",
        "        note()\n        for number, end in ends.items():",
        "        for number, end in ends.items():",
        "tests/lab/training/test_stops.py",
    ),
    python("gates/norm.py", "F.pad(parts.square(), (0, missing))", "F.pad(parts, (0, missing))", NORM, SELFTEST),
    python("gates/norm.py", "min(self.grid.block[1], self.grid.in_features)", "self.grid.block[1]", NORM),
    python("gates/norm.py", ".abs().unsqueeze(1) * norms", ".abs().unsqueeze(1) + 0 * norms", NORM, SELFTEST),
    python(
        "formats/columns.py",
        "pairs[..., 0, :] | pairs[..., 1, :] << 4",
        "pairs[..., 1, :] | pairs[..., 0, :] << 4",
        COLUMNS,
        SELFTEST,
    ),
    python("formats/int8a8.py", "x.amin(1, keepdim=True).clamp_max(0)", "x.amin(1, keepdim=True)", BYTES),
]
