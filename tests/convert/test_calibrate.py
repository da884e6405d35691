"""Gates fitted to data, and layers brought back to the dense model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.convert import reconstruct
from blockgate.gates.magnitude import contributions
from tests.helpers import assert_close, raises_blockgate


def clustered(rows, width=64, clusters=4):
    """Inputs of which each has its size in one of a few groups of features, as trained activations do."""
    groups = torch.randint(clusters, (rows,))
    scale = torch.full((rows, clusters), 0.1).scatter(1, groups[:, None], 2.0)
    return torch.randn(rows, width) * scale.repeat_interleave(width // clusters, 1)


def converted(gate, **options):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = copy.deepcopy(dense)
    options = {"block_size": (64, 16), "sparsity": 0.5, "key_size": None, "gate": gate, **options}
    bg.sparsify_(model, filter_fn=lambda *_: True, **options)
    return dense, model


def error(model, dense, x):
    with torch.no_grad():
        return ((model(x) - dense(x)).norm() / dense(x).norm()).item()


@pytest.mark.parametrize("gate", ["topk", "margin"])
def test_scores_follow_the_norms_of_contributions(gate):
    _, model = converted(gate, key_size=16, gate_hidden=None)
    x = torch.randn(600, 64)
    # Block j of the first layer grows with feature j of the key: just what a linear gate can learn.
    x[:, :4] = torch.rand(600, 4) * 10
    x[:, 4:] *= 0.1
    explained = bg.calibrate(model, [x[:300], x[300:]])
    assert set(explained) == {"0", "2"}
    assert all(0 <= share <= 1 for share in explained.values())
    fresh = converted(gate)[1]
    found = bg.calibrate(fresh, [clustered(400)])
    assert 0 <= found["0"] <= 1


@pytest.mark.parametrize("hidden", [None, 64])
def test_calibrated_gates_open_what_matters(hidden):
    dense, model = converted("topk", normalise="none", gate_hidden=hidden, sparsity=0.75)
    x = clustered(800).abs() * torch.rand(800, 1).add(0.5)

    def first_error():
        return error(model[0], dense[0], x)

    before, weight = first_error(), model[0].weight.clone()
    bg.calibrate(model, [x[:400], (x[400:],)])
    assert torch.equal(model[0].weight, weight)
    assert model[0].sparsity == 0.75
    truth = contributions(x, weight, model[0].grid).argmax(1)
    chosen = model[0].gates(x).flatten(1).argmax(1)
    assert (chosen == truth).float().mean() > 0.9
    assert first_error() < 0.6 * before


def test_fitted_scores_have_the_means_of_their_targets():
    _, model = converted("topk", normalise="none")
    x = clustered(500)
    x[:, :16] += 1.5
    bg.calibrate(model, [x])
    layer = model[0]
    norms = contributions(x, layer.weight.detach(), layer.grid).sqrt()
    wanted = (norms / norms.mean(1, keepdim=True)).mean(0)
    found = layer.gate.scores(x).mean(0).detach()
    assert found.mean().item() == pytest.approx(1, abs=1e-3)
    assert torch.corrcoef(torch.stack([found, wanted]))[0, 1] > 0.9999


def test_margin_gates_take_the_mean_of_what_they_read():
    _, model = converted("margin")
    x = clustered(300) + 3
    bg.calibrate(model, [x])
    assert_close(model[0].gate.key_mean, x.mean(0))


def test_calibration_refuses_what_it_cannot_fit():
    with raises_blockgate("expected a gated linear layer with gate='topk' or 'margin'"):
        bg.calibrate(converted("norm", block_size=(64, 1), key_size="auto")[1], [clustered(3)])
    with raises_blockgate("batches: expected a list of inputs"):
        bg.calibrate(converted("topk")[1], clustered(3))
    with raises_blockgate("batches: expected inputs that reach every layer"):
        bg.calibrate(converted("topk")[1], [])


@pytest.mark.parametrize(("gate", "weights"), [("topk", True), ("topk", False), ("norm", True)])
def test_reconstruction_comes_closer(gate, weights):
    options = {"block_size": (64, 1), "key_size": "auto"} if gate == "norm" else {"normalise": "none"}
    dense, model = converted(gate, **options)
    x = clustered(500).abs()
    before, kept, first = error(model, dense, x), dense[0].weight.clone(), error(model[0], dense[0], x)
    left = reconstruct(model, dense, [x[:250], x[250:]], steps=150, rows=64, lr=3e-3, weights=weights)
    assert left["0"] <= first * 1.0001
    assert not weights or error(model, dense, x) < 0.9 * before
    # The last layer's output is the model's.
    assert left["2"] == pytest.approx(error(model, dense, x), rel=1e-3)
    assert torch.equal(dense[0].weight, kept)
    assert torch.equal(model[0].weight, kept) != weights
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_blocks_far_larger_than_a_weight_take_no_memory():
    """They are those of the weight's size."""
    x, results = clustered(40), []
    for block in (1 << 40, 512):
        dense, model = converted("topk", block_size=block, normalise="none")
        bg.calibrate(model, [x])
        reconstruct(model, dense, [x], steps=2)
        results.append(model(x))
    assert_close(results[0], results[1])


def test_reconstruction_wants_a_teacher_of_its_own():
    dense, model = converted("topk")
    with raises_blockgate("a teacher with parameters of its own"):
        reconstruct(model, model, [clustered(3)])
    with raises_blockgate("batches: expected a list of inputs"):
        reconstruct(model, dense, [])


def test_a_layer_that_comes_no_closer_keeps_what_it_had():
    dense, model = converted("topk", normalise="none")
    x = clustered(100)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    left = reconstruct(model, dense, [x], steps=3, lr=50.0, ridge=None)
    assert left["0"] == pytest.approx(error(model[0], dense[0], x), rel=1e-3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("layer", ["linear", "conv1d", "no bias"])
def test_the_closed_form_is_least_squares(layer):
    torch.manual_seed(0)
    made = {
        "linear": lambda: nn.Linear(24, 30),
        "conv1d": lambda: pytest.importorskip("transformers").pytorch_utils.Conv1D(30, 24),
        "no bias": lambda: nn.Linear(24, 30, bias=False),
    }[layer]
    dense = nn.Sequential(made())
    model = copy.deepcopy(dense)
    # Ragged rows of blocks.
    bg.sparsify_(model, block_size=(16, 5), sparsity=0.5, key_size=None, normalise="none", filter_fn=lambda *_: True)
    x = clustered(600, 24)
    before = error(model, dense, x)
    left = reconstruct(model, dense, [x], steps=0, ridge=1e-6)
    assert left["0"] < before
    # No weight of any row of blocks can be changed to come closer: the error is at right angles to what it reads.
    with torch.no_grad():
        wrong, gates = model(x) - dense(x), model[0].gates(x)
        for row, outputs in enumerate((slice(0, 16), slice(16, 30))):
            seen = x * gates[:, row].repeat_interleave(5, 1)[:, :24]
            assert (seen.T @ wrong[:, outputs]).abs().max() < 1e-3 * (seen.norm() * wrong.norm())
        if layer != "no bias":
            assert wrong.mean(0).abs().max() < 1e-3
    # What is not known stays as it was.
    weight = model[0]._matrix().clone()
    reconstruct(model, dense, [x[:1] * 0], steps=0)
    assert_close(model[0]._matrix(), weight)
