"""Summary and record on gated LSTMs, packed or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockgate as bg


@pytest.fixture
def lstm():
    torch.manual_seed(0)
    return bg.DynamicSparseLSTM(32, 48, 2, block_size=16, key_size=8, sparsity=0.5).eval()


def test_the_papers_lstm_by_hand():
    lstm = bg.DynamicSparseLSTM(1536, 1536, 2, block_size=128, sparsity=0.5, device="meta")
    facts = bg.summary(lstm).to_dict()
    matrix, gates = 6144 * 1536, 576
    assert facts["parameters"] == sum(p.numel() for p in lstm.parameters())
    assert facts["gate_parameters"] == 4 * gates * (128 + 1)
    assert facts["macs_dense"] == 4 * matrix
    assert facts["macs_now"] == 4 * (matrix // 2 + gates * 128)


def test_every_step_is_recorded(lstm):
    x = torch.randn(7, 3, 32)
    with torch.no_grad():
        want = lstm(x)[0]
        with bg.record_gates(lstm) as record:
            torch.testing.assert_close(lstm(x)[0], want)
    facts = record.to_dict()
    names = [f"{part}_l{layer}" for layer in range(2) for part in ("ih", "hh")]
    assert {name: gate["rows"] for name, gate in facts["gates"].items()} == dict.fromkeys(names, 21)


def test_packed_lstms_are_counted_and_recorded(lstm):
    model = nn.Sequential(lstm)
    packed = bg.pack(model, torch.int8)
    x = torch.randn(5, 1, 32)
    before, after = bg.summary(model, x).to_dict(), bg.summary(packed, x).to_dict()
    assert after["macs_dense"] == before["macs_dense"]
    assert after["macs_now"] == pytest.approx(before["macs_now"], rel=0.02)  # int8 may turn a choice between blocks
    with bg.record_gates(packed) as record, torch.no_grad():
        packed(x)
    assert {gate["rows"] for gate in record.to_dict()["gates"].values()} == {5}
