"""A whole LSTM language model, words in and scores of the next word out, against other engines for dense models."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from blockgate.convert import pack
from blockgate.lab.bench.comparison import Comparison, Contender
from blockgate.lab.bench.recurrent import (
    Floors,
    RecurrentCase,
    by_reference,
    open_gates,
    require_close,
    without_onednn,
)
from blockgate.layers import DynamicSparseLSTM

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["compare_language_models", "torch_int8"]

INPUTS = 16

# Words (T, N), h and c (L, N, H) to scores (T, N, V), h and c.
Step: TypeAlias = "Callable[[Tensor, Tensor, Tensor], tuple[Any, Any, Any]]"


class WordModel(nn.Module):
    """Embedding, LSTM, decoder."""

    def __init__(self, vocabulary: int, lstm: nn.Module, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = lstm
        self.decoder = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (T, N, V) and new state for words (T, N) and the state (L, N, H) before."""
        y, (h, c) = self.lstm(self.embedding(words), (h, c))
        return self.decoder(y), h, c


def compare_language_models(case: RecurrentCase, vocabulary: int, floors: Floors) -> Comparison:
    """Ours packed to int8 at each sparsity, decoder dense, against the dense model in other engines.

    Args:
        case: sizes; `steps` words are read in one call, the state is carried on.
        vocabulary: number of words.
        floors: the least speed-up over the fastest of the engines, by sparsity.
    """
    torch.manual_seed(0)
    dense = WordModel(vocabulary, nn.LSTM(case.hidden, case.hidden, case.layers), case.hidden).eval()
    contenders, left_out = [], {}
    for name, build in _engines(case).items():
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                step = build(dense)
                step(*_start(case))
            contenders.append(Contender(name=name, call=_caller(step, case, vocabulary), rival=True))
        except (ImportError, RuntimeError, NotImplementedError) as error:
            left_out[name] = str(error).splitlines()[0]
    for sparsity, floor in floors.items():
        name = f"blockgate int8 {sparsity:.0%}, dense decoder"
        packed = _packed(dense, sparsity, case)
        contenders.append(Contender(name=name, call=_caller(packed, case, vocabulary), floor=floor))
    work = f"LSTM language model, {vocabulary} words, {case.sizes}"
    return Comparison(work=work, contenders=contenders, left_out=left_out)


@torch.no_grad()
def _packed(dense: WordModel, sparsity: float, case: RecurrentCase) -> nn.Module:
    gated = copy.deepcopy(dense)
    gated.lstm = open_gates(DynamicSparseLSTM.from_dense(gated.lstm, sparsity=sparsity, **case.gate_options))  # type: ignore[arg-type]
    packed = pack(gated.eval(), torch.int8)
    start = _start(case)
    require_close(packed(*start)[0], by_reference(gated, packed)(*start)[0], f"int8 at {sparsity:.0%}")
    return packed


def _start(case: RecurrentCase) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.arange(case.steps * case.batch).view(case.steps, case.batch)
    zeros = torch.zeros(case.layers, case.batch, case.hidden)
    return words, zeros, zeros


def _caller(step: Any, case: RecurrentCase, vocabulary: int) -> Callable[[], Any]:
    """Reads the next words and carries the state on."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(vocabulary, (case.steps, case.batch), generator=generator) for _ in range(INPUTS)]
    turn = itertools.cycle(texts)
    state = list(_start(case)[1:])

    @torch.no_grad()
    def call() -> None:
        _, state[0], state[1] = step(next(turn), *state)

    return call


def _engines(case: RecurrentCase) -> dict[str, Callable[[WordModel], Any]]:
    """Ways to run the dense model: name to what makes it ready."""
    return {
        "torch fp32": lambda model: model,
        "torch int8 dynamic": torch_int8,
        "ONNX Runtime fp32": lambda model: _onnxruntime(model, case, quantise=False),
        "ONNX Runtime int8": lambda model: _onnxruntime(model, case, quantise=True),
        "OpenVINO fp32": lambda model: _openvino(model, case),
    }


def torch_int8(model: nn.Module) -> nn.Module:
    """A copy of a dense model whose linear layers and LSTMs have int8 weights, by torch's own means."""
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(copy.deepcopy(model), {nn.LSTM, nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def _need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed; pip install 'blockgate[bench]'")


def _export(model: WordModel, case: RecurrentCase, path: Path) -> None:
    """The dense model as an ONNX file."""
    # The scripted exporter knows nn.LSTM as one op; it must trace the same sizes that run later.
    with without_onednn():
        torch.onnx.export(
            model,
            _start(case),
            path,
            input_names=["words", "h", "c"],
            output_names=["scores", "h_n", "c_n"],
            dynamo=False,
        )


def _onnxruntime(model: WordModel, case: RecurrentCase, *, quantise: bool) -> Step:
    _need("onnx", "onnxruntime")
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export(model, case, path)
        if quantise:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(path, path.with_name("int8.onnx"), weight_type=QuantType.QInt8)
            path = path.with_name("int8.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def step(words: Tensor, h: Any, c: Any) -> tuple[Any, Any, Any]:
        given = {"words": words.numpy(), "h": _array(h), "c": _array(c)}
        scores, h, c = session.run(None, given)
        return scores, h, c

    return step


def _openvino(model: WordModel, case: RecurrentCase) -> Step:
    _need("onnx", "openvino")
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export(model, case, path)
        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
        request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()

    def step(words: Tensor, h: Any, c: Any) -> tuple[Any, Any, Any]:
        results = request.infer({"words": words.numpy(), "h": _array(h), "c": _array(c)})
        return tuple(results.to_tuple())

    return step


def _array(state: Any) -> Any:
    return state.numpy() if isinstance(state, Tensor) else state
