"""Counts agree with those made by hand, totals with the parameters there are, and the model is left as it was."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence

import blockgate as bg
from blockgate.gates.topk import TopKGate
from blockgate.inspect.table import short
from blockgate.spec import GateSpec
from tests.helpers import raises_blockgate
from tests.inspect.helpers import GATE_OPTIONS, inputs, layer_that_opens, small_net


def number_of_parameters(model):
    return sum(p.numel() for p in model.parameters())


def by_name(model, example=None):
    return {layer.name: layer for layer in bg.summary(model, example).layers}


class GatedLSTM(nn.Module):
    """The weights and gates of one gated LSTM layer, under the names of nn.LSTM."""

    def __init__(self, size, **options):
        super().__init__()
        for part in ("ih_l0", "hh_l0"):
            grid = bg.grid.BlockGrid(4 * size, size, 128)
            self.register_parameter(f"weight_{part}", nn.Parameter(torch.empty(4 * size, size, **options)))
            self.register_parameter(f"bias_{part}", nn.Parameter(torch.empty(4 * size, **options)))
            self.add_module(f"gate_{part}", TopKGate(grid, GateSpec(sparsity=0.5), **options))


def test_the_paper_s_quasi_rnn():
    options = {"window": (2, 1, 1, 1), "output_size": 512, "device": "meta"}
    gated = bg.summary(bg.DynamicSparseQRNN(512, 1536, 4, block_size=128, key_size=384, sparsity=0.5, **options))
    filters = [1024 * 4608, 1536 * 4608, 1536 * 4608, 1536 * 1536]
    assert [x.macs_dense for x in gated.layers] == filters
    assert gated.macs_dense == sum(filters) == 21_233_664
    assert [x.blocks for x in gated.layers] == [288, 432, 432, 144]
    assert gated.blocks == 1296
    assert gated.gate_parameters == 1296 * 384 + 1296
    assert gated.macs_now == sum(filters) / 2 + 1296 * 384
    assert gated.macs_saved == pytest.approx(0.5 - 1296 * 384 / sum(filters))
    dense = bg.summary(bg.layers.QRNN(512, 1536, 4, **options))
    assert dense.macs_dense == dense.macs_now == sum(filters)
    assert gated.parameters - gated.gate_parameters == dense.parameters == sum(filters) + 3 * 4608 + 1536


def test_the_paper_s_lstm():
    layers = by_name(nn.ModuleDict({"a": GatedLSTM(1536, device="meta"), "b": GatedLSTM(1536, device="meta")}))
    assert list(layers) == ["a.ih_l0", "a.hh_l0", "b.ih_l0", "b.hh_l0"]
    for line in layers.values():
        assert line.kind == "GatedLSTM"
        assert line.blocks == 576
        assert line.macs_dense == 6144 * 1536
        assert line.macs_now == 6144 * 1536 / 2 + 576 * 128
        assert line.parameters == 6144 * 1536 + 6144
        assert line.gate_parameters == 576 * 129
    dense = by_name(nn.LSTM(1536, 1536, 2, device="meta"))["model"]
    assert dense.macs_dense == 4 * 6144 * 1536
    assert dense.parameters == 4 * (6144 * 1536 + 6144)


def test_measured_on_a_ragged_grid():
    # 2 x 2 blocks of 2 x 2 on a weight of 4 x 3: the second column of blocks is 1 wide.
    layer = layer_that_opens([[0, 1], [0, 2], [3]])
    assert layer.weight.shape == (4, 3)
    (line,) = bg.summary(layer, inputs(layer, [0, 1, 2])).layers
    assert line.name == "gate"
    assert line.measured_density == pytest.approx(5 / 12)
    assert line.target_density == 1.0
    gate_macs = 4 * 3
    assert line.macs_now == pytest.approx((4 + 2 + 4 + 4 + 2) / 3 + gate_macs)
    assert line.bytes_now == pytest.approx(4 * line.macs_now)
    assert line.rows == 3


@pytest.mark.parametrize("options", GATE_OPTIONS.values(), ids=GATE_OPTIONS)
def test_every_gate_kind(options):
    net = small_net(**options)
    result = bg.summary(net, torch.randn(50, 6))
    assert result.parameters == number_of_parameters(net)
    gated = {x.name: x for x in result.layers}["2"]
    assert gated.gate_parameters == number_of_parameters(net[2].gate)
    assert gated.measured_density <= gated.target_density
    assert gated.macs_now == pytest.approx(net[2].gate.weight.numel() + 90 * gated.measured_density, rel=0.2)
    assert result.uncounted == ["LayerNorm"]
    assert {x.name: x.parameters for x in result.layers}["other"] == 18


def test_a_hidden_layer_in_the_gate_counts():
    layer = bg.DynamicSparseLinear(20, 20, block_size=10, sparsity=0.5, key_size=8, gate_hidden=3)
    (line,) = bg.summary(layer).layers
    assert line.macs_now == 200 + 8 * 3 + 3 * 4
    assert line.gate_parameters == 8 * 3 + 3 + 3 * 4 + 4


def test_a_gate_whose_matrix_is_elsewhere():
    owner = nn.Module()
    owner.router = TopKGate(bg.grid.BlockGrid(4, 6, 2), GateSpec(sparsity=0.5))
    owner.matrix = nn.Parameter(torch.zeros(4, 6))
    layers = by_name(owner)
    assert layers["router"].macs_dense == layers["other"].parameters == 24
    assert layers["router"].parameters == 0
    assert layers["router"].gate_parameters == 6 * 7


class Tied(nn.Module):
    """Embedding, two layers of dense LSTM, a decoder that shares the embedding's weight. x (T, N) of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 5, 2, proj_size=3, bidirectional=True)
        self.decoder = nn.Linear(6, 11)
        self.decoder.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, tokens, *, twice=False):
        y = self.decoder(self.rnn(self.embedding(tokens))[0])
        return self.decoder(y[..., :6]) if twice else y


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_plain_layers_and_shared_parameters():
    net = Tied()
    result = bg.summary(net, {"tokens": torch.zeros(4, 2, dtype=torch.int64), "twice": True})
    layers = {x.name: x for x in result.layers}
    assert result.parameters == number_of_parameters(net)
    assert layers["embedding"].parameters == 66
    assert layers["embedding"].macs_dense == 0
    assert layers["decoder"].parameters == 11
    assert layers["decoder"].macs_dense == 66
    assert layers["rnn"].macs_dense == 2 * (20 * 6 + 20 * 3 + 3 * 5) * 2
    assert layers["other"].parameters == 7
    assert result.uncounted == ["Tied"]
    assert {name: x.rows for name, x in layers.items()} == {"embedding": 8, "rnn": 8, "decoder": 16, "other": 0}
    assert result.example_macs_dense == result.example_macs_now == 8 * layers["rnn"].macs_dense + 16 * 66
    assert result.macs_saved == 0


def test_packed_sequences_cells_and_attention():
    rnn = nn.LSTM(3, 4)
    sequences = pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    assert by_name(rnn, (sequences,))["model"].rows == 7
    cell = by_name(nn.LSTMCell(3, 4), torch.randn(5, 3))["model"]
    assert (cell.macs_dense, cell.parameters, cell.rows) == (16 * 7, 16 * 9, 5)
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layers = by_name(attention, torch.randn(3, 5, 8))
    assert layers["self_attn"].macs_dense == 4 * 8 * 8
    assert {layers[name].rows for name in ("self_attn", "linear1", "linear2")} == {15}


def test_parametrized_weights_stay_with_their_layer():
    net = nn.Sequential(nn.Linear(4, 6), bg.DynamicSparseLinear(6, 4, block_size=2))
    before = [(x.parameters, x.macs_dense) for x in bg.summary(net).layers]
    for layer in net:
        parametrizations.spectral_norm(layer)
    after = bg.summary(net, torch.randn(3, 4))
    assert [(x.parameters, x.macs_dense) for x in after.layers] == before
    assert after.parameters == number_of_parameters(net)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.int8, 1)])
def test_packed_models_count_what_they_were_packed_from(dtype, size):
    net = nn.Sequential(nn.Linear(8, 8), bg.DynamicSparseLinear(8, 8, block_size=4, key_size=2)).eval()
    packed = bg.summary(bg.pack(net, dtype))
    plain = bg.summary(net)
    assert packed.parameters == plain.parameters == number_of_parameters(net)
    assert packed.macs_now == plain.macs_now == 64 + 32 + 8
    assert packed.bytes_dense == 128 * 4
    assert packed.bytes_now == (64 + 32) * size + 8 * 4


def test_the_model_is_left_as_it_was():
    net = nn.Sequential(small_net(), nn.Dropout(0.5), nn.BatchNorm1d(3)).train()
    net[0][2].eval()
    modes = [m.training for m in net.modules()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(5)
    before = torch.get_rng_state()

    class Noisy(nn.Module):
        def forward(self, x):
            assert not torch.is_grad_enabled()
            return x + torch.randn_like(x)

    net.append(Noisy())
    bg.summary(net, torch.randn(4, 6, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in net.modules()] == [*modes, True]
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
    assert not any(m._forward_hooks for m in net.modules())


def test_an_example_that_doesn_t_fit_leaves_no_hooks():
    net = small_net().train()
    with pytest.raises(RuntimeError):
        bg.summary(net, torch.randn(4, 7))
    assert all(m.training for m in net.modules())
    assert not any(m._forward_hooks for m in net.modules())


def test_text_markdown_and_json():
    result = bg.summary(small_net(), torch.randn(64, 6))
    text, markdown = str(result), result.to_markdown()
    table = text.splitlines()[: len(result.layers) + 4]
    assert len({len(line) for line in table if line.startswith("-")}) == 1
    assert all(len(line) <= len(table[1]) for line in table)
    assert table[-1].startswith("total")
    for layer in result.layers:
        assert f"| {layer.name} | {layer.kind} |" in markdown
    assert "LayerNorm" in text
    data = result.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["parameters"] == result.parameters
    assert len(data["layers"]) == 4
    assert bg.summary(nn.ReLU()).to_dict()["macs_saved"] == 0
    assert "total" in str(bg.summary(nn.ReLU()))


def test_numbers_are_short():
    numbers = {
        0: "0",
        9999: "9999",
        10_000: "10.00k",
        1106.3: "1106",
        999_960: "1.000M",
        21_233_664: "21.23M",
        3e15: "3000.0T",
    }
    assert {n: short(n) for n in numbers} == numbers


def test_bad_models():
    with raises_blockgate("summary"):
        bg.summary("model")
    with raises_blockgate("lazy layers"):
        bg.summary(nn.LazyLinear(3))
