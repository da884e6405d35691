"""Models of standard ops: the same results, also in ONNX Runtime."""

from __future__ import annotations

import copy
import io
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.integrations.onnx import exportable
from tests.helpers import assert_close, raises_blockgate
from tests.model_zoo import bert, gpt2, tokens

KINDS = [
    {"gate": "margin", "block_size": (8, 5)},
    {"gate": "margin", "block_size": 8, "gate_hidden": 6, "select": "global"},
    {"gate": "topk", "block_size": (7, 8)},
    {"gate": "eq1", "block_size": 8},
    {"gate": "topk", "normalise": "none", "block_size": 8},
    {"gate": "norm", "block_size": (64, 1)},
    {"gate": "norm", "block_size": (8, 3)},
    {"gate": "margin", "block_size": (8, 1 << 40)},
    {"gate": "sigmoid", "block_size": 8, "sparsity": 0.0},
]


def model_of(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 20))
    bg.sparsify_(model, filter_fn=lambda *_: True, **{"sparsity": 0.5, **options})
    for gate in (model[0].gate, model[2].gate):
        for parameter in gate.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.0])
def test_same_results(options, sparsity):
    model = model_of(options)
    if sparsity is not None:
        bg.set_sparsity(model, sparsity)
    x = torch.randn(3, 4, 20)
    before = copy.deepcopy(model.state_dict())
    assert_close(exportable(model)(x), model(x))
    assert_close(exportable(model[0])(x), model[0](x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_paired_mlp_with_one_wide_block():
    mlp = bg.DynamicSparseMLP(8, 12, block_size=1 << 40, sparsity=0.0).eval()
    x = torch.randn(3, 8)
    assert_close(exportable(mlp)(x), mlp(x))


@pytest.mark.parametrize("make", [gpt2, bert])
def test_hugging_face_models(make):
    model = make().eval()
    bg.sparsify_(model, block_size=8)
    example = {"input_ids": tokens()}
    with torch.no_grad():
        assert_close(exportable(model)(**example).logits, model(**example).logits)


def export(model, x, *, dynamo=False):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The older exporter needs onnx only, the default one onnxscript.
        how = {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "opset_version": 17}
        torch.onnx.export(model, x if isinstance(x, tuple) else (x,), file, input_names=["x"], **how)
    return file.getvalue()


def run(model, exported, x):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x.numpy()})
    with torch.no_grad():
        assert_close(torch.from_numpy(np.asarray(y)), model(x))


@pytest.mark.parametrize("options", KINDS)
def test_onnx_runtime_agrees(options):
    pytest.importorskip("onnx")
    model = model_of(options)
    run(model, export(exportable(model), torch.randn(5, 20)), torch.randn(5, 20))


@pytest.mark.parametrize("options", [KINDS[0], KINDS[5]])
def test_the_default_exporter_agrees(options):
    pytest.importorskip("onnxscript")
    model = model_of(options)
    run(model, export(exportable(model), torch.randn(5, 20), dynamo=True), torch.randn(5, 20))


def packed_of(options):
    return bg.pack(model_of(options), "int8")


LINEAR, SEQUENCE = torch.randn(5, 20), torch.randn(4, 3, 8)
REFUSED = {
    "gated layer": (lambda: model_of(KINDS[0]), LINEAR, "a gated layer. Export blockgate.integrations.onnx.exportable"),
    "norm": (lambda: model_of(KINDS[5]), LINEAR, "a gated layer. Export blockgate.integrations.onnx.exportable(model)"),
    "packed": (lambda: packed_of(KINDS[0]), LINEAR, "a packed layer. Export blockgate.integrations.onnx.exportable"),
    "columns": (lambda: packed_of(KINDS[5]), LINEAR, "a packed layer. Export blockgate.integrations.onnx.exportable"),
    "dense, packed": (lambda: bg.pack(nn.Linear(20, 8)), LINEAR, "or the dense model itself"),
    "LSTM": (lambda: bg.DynamicSparseLSTM(8, 8, block_size=4), SEQUENCE, "a gated recurrent layer. This kind has no"),
    "GRU": (lambda: bg.DynamicSparseGRU(8, 8, block_size=4), SEQUENCE, "a gated recurrent layer. This kind has no"),
    "packed LSTM": (lambda: bg.pack(nn.LSTM(8, 8)), SEQUENCE, "a packed recurrent layer. This kind has no form of"),
    "QRNN": (lambda: bg.DynamicSparseQRNN(8, 8, block_size=4), SEQUENCE, "a Quasi-RNN. This kind has no form of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_way_out_is_named(name):
    make, x, message = REFUSED[name]
    with raises_blockgate(message):
        export(make().eval(), x)


@pytest.mark.parametrize("name", REFUSED)
def test_the_default_exporter_names_it_too(name):
    pytest.importorskip("onnxscript")
    make, x, message = REFUSED[name]
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        export(make().eval(), x, dynamo=True)
    # The exporter puts an error of its own around ours.
    error = caught.value
    while error is not None and not isinstance(error, bg.errors.BlockgateError):
        error = error.__cause__
    assert error is not None


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in {"gated layer", "norm"}])
def test_exportable_refuses_what_has_no_form(name):
    model = REFUSED[name][0]()
    with raises_blockgate("exportable: expected a model of gated linear layers, not packed"):
        exportable(model)
    with raises_blockgate("at '1"):
        exportable(nn.Sequential(nn.Linear(8, 8), model))


def test_mistakes():
    with raises_blockgate("exportable: expected a model with gated linear layers"):
        exportable(nn.Linear(3, 3))
    softmax = model_of({"gate": "softmax_sum", "block_size": 8})
    with raises_blockgate("exportable: expected gates of kind topk, margin, norm or sigmoid"):
        exportable(softmax)
