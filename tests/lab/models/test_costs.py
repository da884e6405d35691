"""Multiply-adds and parameters against what is computed by hand, and small dense models of equal cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockgate.lab.baselines import MagnitudePruner, prunable_weights
from blockgate.lab.models import (
    ImageNetwork,
    ImageNetworkConfig,
    LanguageModel,
    LanguageModelConfig,
    count_costs,
    small_dense,
)
from blockgate.spec import GateSpec

GATE = GateSpec(block_size=4, sparsity=0.75, key_size=4, gate="eq1")
LSTM = LanguageModelConfig(cell="lstm", embedding_size=8, hidden_size=16, projection=True, gate=GATE)
# Layers 64 x 8, 64 x 16, 64 x 16, 64 x 16; projection 16 x 8; 50 words.
LSTM_MATRICES = 64 * (8 + 16 + 16 + 16)
HEAD = 16 * 8 + 50 * 8


def test_a_dense_lstm():
    costs = count_costs(LanguageModel(LSTM, 50))
    assert (costs.macs, costs.macs_dense) == (LSTM_MATRICES + HEAD, LSTM_MATRICES + HEAD)
    assert (costs.matrix_macs, costs.matrix_macs_dense) == (LSTM_MATRICES, LSTM_MATRICES)
    assert costs.parameters == LSTM_MATRICES + 4 * 64 + 16 * 8 + 8 + 50 * 8 + 50
    assert costs.zeros == costs.gate_parameters == costs.gate_macs == 0


def test_a_gated_lstm():
    costs = count_costs(LanguageModel(replace(LSTM, matrices="dynamic"), 50))
    blocks = LSTM_MATRICES // 16
    assert costs.gate_macs == blocks * 4
    assert costs.gate_parameters == blocks * 5
    assert costs.macs == LSTM_MATRICES / 4 + blocks * 4 + HEAD
    assert costs.macs_dense == LSTM_MATRICES + HEAD


def test_rounding_to_whole_blocks_counts():
    gate = replace(GATE, sparsity=0.9, gate="topk", select="per_row")
    config = replace(LSTM, matrices="dynamic", gate=gate)
    # One block in every row of 2 or 4.
    assert count_costs(LanguageModel(config, 50)).matrix_macs == 64 * 4 * 4 + LSTM_MATRICES // 16 * 4


def test_measured_densities_count_where_there_are_some():
    model = LanguageModel(replace(LSTM, matrices="dynamic"), 50)
    measured = count_costs(model, {"layers.0.ih_l0": 0.5})
    assert measured.macs - count_costs(model).macs == 64 * 8 * 0.25


def test_zeros_cost_nothing():
    model = LanguageModel(LSTM, 50)
    MagnitudePruner(prunable_weights(model, lambda name: name.startswith("layers.")), 0.5, 1, 1).step()
    costs = count_costs(model)
    assert costs.zeros == LSTM_MATRICES / 2
    assert costs.macs == LSTM_MATRICES / 2 + HEAD
    assert count_costs(LanguageModel(replace(LSTM, matrices="static"), 50)).matrix_macs == LSTM_MATRICES / 4


def test_a_quasi_rnn_with_groups_of_words():
    config = LanguageModelConfig(
        cell="qrnn", embedding_size=8, hidden_size=16, num_layers=3, windows=(2, 1), projection=False, cutoffs=(10, 20)
    )
    # Filters 48 x 16, 48 x 16, 24 x 16, and two rows for the groups beside the 50 words.
    assert count_costs(LanguageModel(config, 50)).macs == 48 * 16 * 2 + 24 * 16 + 52 * 8


def test_an_image_network():
    costs = count_costs(ImageNetwork(ImageNetworkConfig(hidden_size=16, hidden_layers=2, gate=GATE), 20, 5))
    assert costs.matrix_macs == 2 * (256 / 4 + 16 * 4)
    assert costs.macs_dense == 20 * 16 + 2 * 256 + 16 * 5


def test_the_papers_quasi_rnn():
    config = LanguageModelConfig(
        cell="qrnn", embedding_size=512, hidden_size=1536, num_layers=4, gate=GateSpec(block_size=128, key_size=384)
    )
    with torch.device("meta"):
        costs = count_costs(LanguageModel(replace(config, matrices="dynamic"), 10000))
    assert costs.matrix_macs_dense == 1024 * 4608 + 2 * 1536 * 4608 + 1536 * 1536
    assert costs.gate_macs == 1296 * 384


def test_a_small_dense_lstm_by_hand():
    macs = count_costs(LanguageModel(replace(LSTM, matrices="dynamic"), 50)).macs
    # 4h * 8 + 3 * 4h * h + 8h + 400 >= 2320 for the first time at h = 12 (2608); 11 gives 2292.
    assert macs == 896 + 896 + 528
    assert small_dense(LSTM, 50, macs) == replace(LSTM, matrices="dense", hidden_size=12)


def test_a_small_dense_lstm_whose_embedding_is_as_wide():
    config = LanguageModelConfig(cell="lstm", embedding_size=16, hidden_size=16, tied=False, dropout=0.5)
    # 16 h^2 + 50 h: 880 at h = 6, 666... at 5.
    small = small_dense(config, 50, 870)
    assert (small.hidden_size, small.embedding_size, small.dropout) == (6, 6, 0.5)


@pytest.mark.parametrize("width", [1, 2, 7, 16, 33])
def test_a_dense_model_costs_as_much_as_itself(width):
    config = replace(LSTM, hidden_size=width)
    assert small_dense(config, 50, count_costs(LanguageModel(config, 50)).macs).hidden_size == width
