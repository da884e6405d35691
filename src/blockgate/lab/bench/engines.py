"""Other engines for dense models: torch's own int8, ONNX Runtime and OpenVINO."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from blockgate.lab.models import LanguageModel

__all__ = ["Step", "engines", "torch_int8", "without_onednn"]

# A language model's call: words (T, N) and the carried state, None at first, to log-probabilities and the new state.
Step: TypeAlias = Callable[[Tensor, Any], tuple[Any, Any]]


def engines(words: Tensor) -> dict[str, Callable[[LanguageModel], Step]]:
    """Ways to run a dense LSTM language model: name to what makes it ready for words of this shape (T, N)."""
    return {
        "torch fp32": lambda model: model,
        "torch int8 dynamic": torch_int8,
        "ONNX Runtime fp32": lambda model: _onnxruntime(model, words, quantise=False),
        "ONNX Runtime int8": lambda model: _onnxruntime(model, words, quantise=True),
        "OpenVINO fp32": lambda model: _openvino(model, words),
    }


def torch_int8(model: nn.Module) -> nn.Module:
    """A copy of a dense model whose linear layers and LSTMs have int8 weights, by torch's own means."""
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(copy.deepcopy(model), {nn.LSTM, nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


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

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities (T, N, V) and the new h and c for words (T, N), h and c (L, N, H)."""
        log_probabilities, ((h, c),) = self.model(words, ((h, c),))
        return log_probabilities, h, c


def _no_state(model: LanguageModel, words: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(model.config.num_layers, words.shape[1], model.config.hidden_size)
    return zeros, zeros


def _export(model: LanguageModel, words: Tensor, path: Path) -> None:
    """The dense model as an ONNX file."""
    # The scripted exporter knows nn.LSTM as one op; it must trace the same sizes that run later.
    with without_onednn():
        torch.onnx.export(
            _FlatState(model).eval(),
            (words, *_no_state(model, words)),
            path,
            input_names=["words", "h", "c"],
            output_names=["log_probabilities", "h_n", "c_n"],
            dynamo=False,
        )


def _with_arrays(run: Callable[[dict[str, Any]], Any], model: LanguageModel) -> Step:
    """A step of an engine that takes arrays by name, and gives log-probabilities, h and c."""

    def step(words: Tensor, carried: Any) -> tuple[Any, Any]:
        h, c = (state.numpy() for state in _no_state(model, words)) if carried is None else carried
        log_probabilities, *carried = run({"words": words.numpy(), "h": h, "c": c})
        return log_probabilities, carried

    return step


def _onnxruntime(model: LanguageModel, words: Tensor, *, quantise: bool) -> Step:
    _need("onnx", "onnxruntime")
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export(model, words, path)
        if quantise:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(path, path.with_name("int8.onnx"), weight_type=QuantType.QInt8)
            path = path.with_name("int8.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return _with_arrays(lambda given: session.run(None, given), model)


def _openvino(model: LanguageModel, words: Tensor) -> Step:
    _need("onnx", "openvino")
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export(model, words, path)
        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
        request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()
    return _with_arrays(lambda given: request.infer(given).to_tuple(), model)
