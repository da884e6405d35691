"""Summary and record on gated LSTMs and GRUs, packed or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import blockgate as bg
from blockgate.runtime.recurrent import matrix_names
from tests.layers.test_recurrent import EACH_KIND, KINDS


def build(kind):
    torch.manual_seed(0)
    return kind.make(32, 48, 2, block_size=16, key_size=8, sparsity=0.5).eval()


def test_the_papers_lstm_by_hand():
    lstm = bg.DynamicSparseLSTM(1536, 1536, 2, block_size=128, sparsity=0.5, device="meta")
    facts = bg.summary(lstm).to_dict()
    matrix, gates = 6144 * 1536, 576
    assert facts["parameters"] == sum(p.numel() for p in lstm.parameters())
    assert facts["gate_parameters"] == 4 * gates * (128 + 1)
    assert facts["macs_dense"] == 4 * matrix
    assert facts["macs_now"] == 4 * (matrix // 2 + gates * 128)


@EACH_KIND
def test_every_step_is_recorded(kind):
    lstm = build(kind)
    x = torch.randn(7, 3, 32)
    with torch.no_grad():
        want = lstm(x)[0]
        with bg.record_gates(lstm) as record:
            torch.testing.assert_close(lstm(x)[0], want)
    facts = record.to_dict()
    names = matrix_names(lstm)
    assert len(names) == 4 * kind.directions
    assert {name: gate["rows"] for name, gate in facts["gates"].items()} == dict.fromkeys(names, 21)


@EACH_KIND
def test_dense_layers_cost_what_gated_ones_would_dense(kind):
    dense, gated = bg.summary(kind.make_dense(32, 48, 2)), bg.summary(build(kind))
    gates = 3 if kind.dense is nn.GRU else 4
    assert dense.macs_dense == gated.macs_dense
    second = 48 * kind.directions
    assert dense.macs_dense == kind.directions * gates * 48 * (32 + 48 + second + 48)


@EACH_KIND
def test_packed_layers_are_counted_and_recorded(kind):
    model = nn.Sequential(build(kind))
    packed = bg.pack(model, torch.int8)
    x = torch.randn(5, 1, 32)
    before, after = bg.summary(model, x).to_dict(), bg.summary(packed, x).to_dict()
    assert after["macs_dense"] == before["macs_dense"]
    assert after["macs_now"] == pytest.approx(before["macs_now"], rel=0.02)  # int8 may turn a choice between blocks
    with bg.record_gates(packed) as record, torch.no_grad():
        packed(x)
    assert {gate["rows"] for gate in record.to_dict()["gates"].values()} == {5}


@pytest.mark.parametrize("kind", ["lstm, both ways", "gru, both ways"])
@torch.no_grad()
def test_rows_of_the_direction_from_the_end_are_recorded_in_their_own_order(kind):
    both = build(KINDS[kind])
    one = build(KINDS[kind.removesuffix(", both ways")])
    one.load_state_dict(
        {k.replace("_reverse", ""): v for k, v in both.state_dict().items() if "l0_reverse" in k}, strict=False
    )
    sequences = [torch.randn(n, 32) for n in (4, 2, 3)]
    x = pack_sequence(sequences, enforce_sorted=False)
    numbers = [torch.arange(10 * n, 10 * n + len(sequence)) for n, sequence in enumerate(sequences)]
    names = pack_sequence(numbers, enforce_sorted=False)
    with bg.record_gates(both, trace=9) as record, record.labelled(names.data):
        both(x)
    for n, sequence in enumerate(sequences):
        with bg.record_gates(one, trace=4) as alone:
            one(sequence.flip(0))
        for part in ("ih", "hh"):
            kept, want = record.gates[f"{part}_l0_reverse"], alone.gates[f"{part}_l0"]
            assert kept.rows == 9
            for step in range(len(sequence)):
                row = names.data.tolist().index(10 * n + step)
                expected = want.trace[len(sequence) - 1 - step]
                assert torch.equal(kept.trace[row], expected)
                assert torch.equal(kept.class_open_counts[10 * n + step].bool(), expected.flatten() != 0)
