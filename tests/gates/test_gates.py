from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockgate as bg
from blockgate.gates import gate_kinds, make_gate
from blockgate.gates.sigmoid import SigmoidGate
from blockgate.gates.softmax_sum import SoftmaxSumGate
from blockgate.gates.topk import TopKGate
from blockgate.grid import BlockGrid, open_blocks
from blockgate.spec import GateSpec
from tests.helpers import assert_close, raises_blockgate

GRID = BlockGrid(8, 12, (2, 3))  # 4 x 4 blocks

# The oracle of the laboratory needs the weight of its layer; others may have registered theirs.
KINDS = [kind for kind in gate_kinds() if kind != "oracle"]


def positive(gate: TopKGate) -> TopKGate:
    """Makes every score positive, so that exactly k gates open."""
    torch.nn.init.constant_(gate.bias, 10.0)
    return gate


@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 12),
    st.floats(0, 0.99),
    st.sampled_from(["global", "per_row"]),
    st.sampled_from(["mean", "rms"]),
)
def test_topk_opens_k_and_averages_one(out_features, in_features, block, sparsity, select, normalise):
    grid = BlockGrid(out_features, in_features, block)
    gate = positive(TopKGate(grid, GateSpec(sparsity=sparsity, select=select, normalise=normalise)))
    x = torch.randn(5, in_features)
    dense = gate.dense(x)
    if select == "global":
        assert ((dense > 0).sum((1, 2)) == open_blocks(sparsity, grid.num_blocks)).all()
    else:
        assert ((dense > 0).sum(2) == open_blocks(sparsity, grid.in_blocks)).all()
    average = dense.mean((1, 2)) if normalise == "mean" else dense.square().mean((1, 2)).sqrt()
    assert_close(average, torch.ones(5), normalise)


def test_fresh_gates_open_at_most_k():
    gate = TopKGate(GRID, GateSpec(sparsity=0.25))
    opened = (gate.dense(torch.randn(200, 12)) > 0).sum((1, 2))
    assert opened.max() <= 12
    # About half of the scores are positive at first, so fewer than k open.
    assert opened.float().mean() < 12
    assert gate.bias.count_nonzero() == 0


def test_topk_equals_the_equations():
    gate = make_gate(GateSpec(gate="eq1", sparsity=0.5, key_size=5, key_offset=2), GRID)
    x = torch.randn(6, 12)
    scores = torch.relu(x[:, 2:7] @ gate.weight.T + gate.bias)
    threshold = scores.topk(8, dim=-1).values[:, -1:]
    kept = torch.where(scores >= threshold, scores, 0)
    assert_close(gate.dense(x).flatten(1), kept / kept.mean(-1, keepdim=True))


def test_the_gate_reads_its_key_only():
    gate = TopKGate(GRID, GateSpec(sparsity=0.5, key_size=4, key_offset=3))
    x = torch.randn(3, 12)
    other = torch.randn(3, 12)
    other[:, 3:7] = x[:, 3:7]
    torch.testing.assert_close(gate.dense(x), gate.dense(other), rtol=0, atol=0)
    other[:, 3] += 1
    assert not torch.equal(gate.dense(x), gate.dense(other))


@pytest.mark.parametrize(
    ("options", "size", "offset"),
    [({}, 128, 0), ({"key_size": None}, 300, 0), ({"key_size": 7}, 7, 0), ({"key_offset": 250}, 50, 250)],
)
def test_key_defaults(options, size, offset):
    gate = TopKGate(BlockGrid(8, 300, 2), GateSpec(sparsity=0.5, **options))
    assert (gate.key_size, gate.key_offset) == (size, offset)
    assert gate.weight.shape == (4 * 150, size)


def test_hidden_layer_is_between_key_and_scores():
    gate = TopKGate(GRID, GateSpec(sparsity=0.5, gate_hidden=3))
    x = torch.randn(4, 12)
    hidden = torch.relu(x @ gate.hidden_weight.T + gate.hidden_bias)
    assert_close(gate.scores(x), hidden @ gate.weight.T + gate.bias)
    assert set(dict(gate.named_parameters())) == {"weight", "bias", "hidden_weight", "hidden_bias"}
    gate.dense(x).square().sum().backward()
    assert gate.hidden_weight.grad.abs().sum() > 0


def test_sigmoid_opens_everything_with_mean_one():
    gate = SigmoidGate(GRID, GateSpec(sparsity=0))
    x = torch.randn(5, 12)
    dense = gate.dense(x)
    raw = torch.sigmoid(gate.scores(x))
    assert (dense > 0).all()
    assert_close(dense.flatten(1), raw / raw.mean(-1, keepdim=True))


def test_softmax_sum_trains_soft_and_evaluates_hard():
    gate = SoftmaxSumGate(GRID, GateSpec(sparsity=0.75), temperature=0.5)
    assert gate.heads == 4
    x = torch.randn(5, 12)
    scores = gate.scores(x).view(5, 4, 16)
    assert_close(gate.dense(x).flatten(1), torch.softmax(scores / 0.5, -1).sum(1) * 4)
    gate.eval()
    dense = gate.dense(x).flatten(1)
    want = torch.zeros(5, 16)
    for row in range(5):
        for head in range(4):
            want[row, scores[row, head].argmax()] += 4.0
    assert_close(dense, want)
    assert gate(x)[0].shape == (5, 4)


def test_softmax_sum_heads_are_fixed():
    gate = SoftmaxSumGate(GRID, GateSpec(sparsity=0.75))
    gate.target_sparsity = 0.9
    assert gate.open_blocks == 2
    x = torch.randn(3, 12)
    first_two = torch.softmax(gate.scores(x).view(3, 4, 16)[:, :2], -1).sum(1) * 8
    assert_close(gate.dense(x).flatten(1), first_two)
    with raises_blockgate(
        "sparsity: expected a value that opens at most the 4 heads of this gate, got '0.5 (8 blocks)'"
    ):
        gate.target_sparsity = 0.5
    assert gate.target_sparsity == 0.9


def test_softmax_sum_sharpens_as_the_temperature_falls():
    gate = SoftmaxSumGate(GRID, GateSpec(sparsity=0.9))
    x = torch.randn(1, 12)
    closed = []
    for gate.temperature in (1.0, 0.1, 0.001):
        closed.append((gate.dense(x) < 0.01).sum().item())
    assert closed == sorted(closed)
    assert closed[0] < 14 <= closed[-1]
    for wrong in (0, -1.0, float("nan"), True, "cold"):
        with raises_blockgate(f"temperature: expected a positive number, got {wrong!r}"):
            gate.temperature = wrong
    assert gate.temperature == 0.001


def test_checkpoints_hold_the_temperature():
    gate, other = (SoftmaxSumGate(GRID, GateSpec(sparsity=0.75)) for _ in range(2))
    gate.temperature = 0.3
    state = gate.half().state_dict()
    other.load_state_dict(state)
    assert (other.temperature, other.target_sparsity) == (0.3, 0.75)
    gate.temperature = 0.2
    assert (other.temperature, float(state["temperature"])) == (0.3, 0.3)
    del state["temperature"]  # as in older files
    other.load_state_dict(state)
    assert other.temperature == 0.3
    with pytest.raises(RuntimeError, match="temperature: expected a positive number, got 0"):
        other.load_state_dict(state | {"temperature": torch.tensor(0.0)})


def test_a_falling_temperature_compiles_once():
    layer = bg.DynamicSparseLinear(8, 8, block_size=4, sparsity=0.5, gate="softmax_sum", backend="reference")
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=count)
    x = torch.randn(3, 8)
    for layer.gate.temperature in (1.0, 0.5, 0.25):
        assert_close(compiled(x), layer(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_kind_has_the_same_interface(kind, rows):
    gate = make_gate(GateSpec(gate=kind, sparsity=0), GRID)
    for training in (True, False):
        gate.train(training)
        values, indices = gate(torch.randn(rows, 12))
        assert values.shape == indices.shape
        assert values.shape[0] == rows
        assert indices.dtype == torch.int64
        assert gate.dense(torch.randn(rows, 12)).shape == (rows, 4, 4)
        assert gate.kind in repr(gate)


@pytest.mark.parametrize("kind", KINDS)
def test_near_dense_start_is_close_to_one(kind):
    gate = make_gate(GateSpec(gate=kind, sparsity=0), GRID)
    gate.reset_near_dense()
    for training in (True, False):
        gate.train(training)
        assert (gate.dense(torch.randn(50, 12)) - 1).square().mean().sqrt() < 0.05


@pytest.mark.parametrize(("columns", "select"), [(1, "global"), (3, "global"), (4, "per_row"), (9, "per_row")])
def test_rows_of_few_blocks_choose_among_all(columns, select):
    grid = BlockGrid(8 * 16, columns * 16, 16)
    gate = make_gate(GateSpec(gate="topk", sparsity=0.75), grid)
    assert gate.select == select
    assert abs(gate.target_density - 0.25) <= 0.05
    assert make_gate(GateSpec(gate="topk", sparsity=0.75, select="per_row"), grid).select == "per_row"


def test_the_paper_s_rule_may_be_said_twice():
    gate = make_gate(GateSpec(gate="eq1", sparsity=0.5, normalise="mean", select="global"), GRID)
    assert (gate.normalise, gate.select) == ("mean", "global")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gate": "hard"}, "gate: expected one of ('topk', 'eq1', 'margin', 'norm', 'sigmoid', 'softmax_sum'"),
        ({"normalise": "max"}, "normalise: expected one of ('mean', 'rms', 'none'), got 'max'"),
        ({"select": "column"}, "select: expected one of ('global', 'per_row'), got 'column'"),
        ({"key_size": 13}, "key_size: expected an int from 1 to 12 (in_features 12 - key_offset 0), got 13"),
        ({"key_size": 0}, "key_size: expected an int from 1 to 12"),
        ({"key_size": 10, "key_offset": 4}, "key_size: expected an int from 1 to 8"),
        ({"key_offset": 12}, "key_offset: expected an int from 0 to 11, got 12"),
        ({"key_offset": -1}, "key_offset: expected an int from 0 to 11, got -1"),
        ({"key_size": True}, "key_size: expected an int from 1 to 12"),
        ({"key_size": 2.0}, "key_size: expected an int from 1 to 12"),
        ({"gate": ["topk"]}, "gate: expected the name of a kind of gate, got ['topk']"),
        ({"gate_hidden": True}, "gate_hidden: expected a positive int, got True"),
        ({"gate_hidden": 0}, "gate_hidden: expected a positive int, got 0"),
        ({"sparsity": 1.0}, "sparsity: expected a number in [0, 1), got 1.0"),
        ({"gate": "sigmoid", "sparsity": 0.5}, "sparsity: expected 0 with gate='sigmoid', got 0.5"),
        ({"gate": "sigmoid", "sparsity": 0, "normalise": "rms"}, "normalise and select: expected neither with gate="),
        ({"gate": "eq1", "select": "per_row"}, "normalise and select: expected neither with gate='eq1'"),
        ({"backend": "gpu"}, "backend: expected one of ('auto', 'reference', 'cpu', 'triton'), got 'gpu'"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with raises_blockgate(message):
        make_gate(GateSpec(**{"sparsity": 0.5, **arguments}), GRID)


@pytest.mark.parametrize("kind", ["topk", "margin"])
def test_blocks_with_small_weights_are_the_first_to_close(kind):
    weight = torch.randn(16, 12)
    weight[:4, 3:6] *= 0.1
    weight[8:12, 9:] *= 0.1
    # Three of four open in every row of blocks.
    layer = bg.DynamicSparseLinear.from_dense(nn.Linear(12, 16), gate=kind, block_size=(4, 3), sparsity=0.25)
    layer.gate.reset_near_dense(weight)
    nn.init.zeros_(layer.gate.weight)
    opened = layer.eval().gates(torch.randn(5, 12)) != 0
    assert opened.sum((1, 2)).tolist() == [12] * 5
    assert not opened[:, 0, 1].any()
    assert not opened[:, 2, 3].any()
    assert (layer.gate.bias - 1).abs().max() < 0.1
