"""Other engines for dense models: torch's own int8, ONNX Runtime and OpenVINO."""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from blockgate.lab.models import LanguageModel

__all__ = ["Step", "engines", "greedy_step", "torch_int8", "without_onednn"]

# Of one layer of an nn.LSTM.
LSTM_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

# A language model's call: words (T, N) and the carried state, None at first, to what is asked for and the new state.
Step: TypeAlias = Callable[[Tensor, Any], tuple[Any, Any]]


def engines(words: Tensor, *, greedy: bool = False) -> dict[str, Callable[[LanguageModel], Step]]:
    """Ways to run a dense LSTM language model: name to what makes it ready for words of this shape (T, N).

    `greedy`: steps give the number of the likeliest next word in place of log-probabilities, which nobody computes.
    """
    run = greedy_step if greedy else lambda model: model
    return {
        "torch fp32": run,
        "torch int8 dynamic": lambda model: run(torch_int8(model)),
        "ONNX Runtime fp32": lambda model: _onnxruntime(model, words, quantise=False, greedy=greedy),
        "ONNX Runtime int8": lambda model: _onnxruntime(model, words, quantise=True, greedy=greedy),
        "OpenVINO fp32": lambda model: _openvino(model, words, quantise=False, greedy=greedy),
        "OpenVINO int8": lambda model: _openvino(model, words, quantise=True, greedy=greedy),
    }


def greedy_step(model: nn.Module) -> Step:
    """The call of a language model, packed or not, that gives the numbers (N, 1) of the likeliest next words."""

    def step(words: Tensor, carried: Any) -> tuple[Any, Any]:
        _, numbers, carried = cast("LanguageModel", model).likeliest(words, carried)
        return numbers, carried

    return step


def torch_int8(model: nn.Module) -> nn.Module:
    """A copy of a dense model whose linear layers, LSTMs and GRUs have int8 weights, by torch's own means."""
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(copy.deepcopy(model), {nn.LSTM, nn.GRU, nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


@contextmanager
def without_onednn() -> Iterator[None]:
    """Switches oneDNN off: torch's own flags() warns about settings that it doesn't change."""
    before = torch.backends.mkldnn.set_flags(False)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed; pip install 'blockgate[bench]'")


class _FlatState(nn.Module):
    """A language model with one LSTM stack whose state goes in and out as two tensors, which ONNX needs."""

    def __init__(self, model: LanguageModel, greedy: bool) -> None:
        super().__init__()
        self.model = model
        self.step = greedy_step(model) if greedy else model

    def forward(self, words: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a step gives, and the new h and c, for words (T, N), h and c (L, N, H)."""
        given, ((h, c),) = self.step(words, ((h, c),))
        return given, h, c


class _Products(nn.Module):
    """`_FlatState` for one step, its LSTM written as linear layers: OpenVINO keeps no other weights in int8."""

    def __init__(self, model: LanguageModel, greedy: bool) -> None:
        super().__init__()
        self.model, self.greedy = model, greedy
        self.lstm = cast("nn.LSTM", model.layers[0])

    def forward(self, words: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a step gives, and the new h and c, for words (1, N), h and c (L, N, H)."""
        x = self.model.embedding(words)[0]
        hidden, cells = [], []
        for layer in range(self.lstm.num_layers):
            w_ih, w_hh, b_ih, b_hh = (getattr(self.lstm, f"{name}_l{layer}") for name in LSTM_PARAMETERS)
            sums = nn.functional.linear(x, w_ih, b_ih) + nn.functional.linear(h[layer], w_hh, b_hh)
            i, f, g, o = sums.chunk(4, dim=-1)
            cell = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
            x = o.sigmoid() * cell.tanh()
            hidden.append(x)
            cells.append(cell)
        given = self.model.softmax.likeliest(x, 1)[1] if self.greedy else self.model.softmax(x)[None]
        return given, torch.stack(hidden), torch.stack(cells)


def _no_state(model: LanguageModel, words: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(model.config.num_layers, words.shape[1], model.config.hidden_size)
    return zeros, zeros


def _export(model: nn.Module, given: tuple[Tensor, ...], path: Path) -> None:
    """A model of words, h and c as an ONNX file."""
    # The scripted exporter knows nn.LSTM as one op; it must trace the same sizes that run later.
    with without_onednn():
        torch.onnx.export(
            model.eval(),
            given,
            path,
            input_names=["words", "h", "c"],
            output_names=["given", "h_n", "c_n"],
            dynamo=False,
        )


def _with_arrays(run: Callable[[dict[str, Any]], Any], model: LanguageModel) -> Step:
    """A step of an engine that takes arrays by name, and gives its result, h and c."""

    def step(words: Tensor, carried: Any) -> tuple[Any, Any]:
        h, c = (state.numpy() for state in _no_state(model, words)) if carried is None else carried
        given, *carried = run({"words": words.numpy(), "h": h, "c": c})
        return given, carried

    return step


def _onnxruntime(model: LanguageModel, words: Tensor, *, quantise: bool, greedy: bool) -> Step:
    _need("onnx", "onnxruntime")
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export(_FlatState(model, greedy), (words, *_no_state(model, words)), path)
        if quantise:
            path = _quantised(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return _with_arrays(lambda given: session.run(None, given), model)


def _quantised(path: Path) -> Path:
    """An ONNX file with int8 weights, beside one with float32."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    # Quantisation transposes the weight of an output layer; an embedding that shares it must keep its own.
    stored = {weight.name: weight for weight in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in stored:
            weight = model.graph.initializer.add()
            weight.CopyFrom(stored[node.input[0]])
            weight.name = node.input[0] = f"{weight.name} of {node.name}"
    onnx.save(model, path)
    written = path.with_name("int8.onnx")
    logging.disable(logging.WARNING)  # it advises a preparation that changes nothing here
    try:
        quantize_dynamic(path, written, weight_type=QuantType.QInt8)
    finally:
        logging.disable(logging.NOTSET)
    return written


def _openvino(model: LanguageModel, words: Tensor, *, quantise: bool, greedy: bool) -> Step:
    _need("onnx", "openvino")
    import openvino

    if quantise and len(words) > 1:
        raise NotImplementedError("its LSTM has no int8 weights; linear layers stand in for it in a single step only")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export((_Products if quantise else _FlatState)(model, greedy), (words, *_no_state(model, words)), path)
        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
        read = core.read_model(path)
        if quantise:
            _compress_weights(read)
        request = core.compile_model(read, "CPU", settings).create_infer_request()
    return _with_arrays(lambda given: request.infer(given).to_tuple(), model)


def _compress_weights(model: Any) -> None:
    """Gives an OpenVINO model int8 weights with a scale for each output, in the form that its kernels read."""
    import numpy as np
    from openvino import opset13

    for product in model.get_ops():
        if product.get_type_name() != "MatMul":
            continue
        source = product.input_value(1).get_node()
        if source.get_type_name() != "Constant":
            continue
        weight = np.array(source.data)
        inputs = -1 if product.get_attributes()["transpose_b"] else 0
        scale = np.abs(weight).max(axis=inputs, keepdims=True) / 127
        stored = opset13.constant(np.round(weight / scale).astype(np.int8))
        floats = opset13.multiply(opset13.convert(stored, "f32"), opset13.constant(scale.astype(np.float32)))
        product.input(1).replace_source_output(floats.output(0))
