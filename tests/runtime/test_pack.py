from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune

import blockgate as bg
from blockgate.formats import FORMATS
from blockgate.runtime import PackedDynamicSparseLinear, PackedLinear
from tests.helpers import assert_close, raises_blockgate

DTYPES = list(FORMATS)
# Largest relative error of a random layer's output against float32.
ERROR = {"float32": 1e-6, "bfloat16": 0.01, "float16": 0.002, "int8": 0.02, "int8a8": 0.04, "int4": 0.1}


class Net(nn.Module):
    """A gated layer, the same one again, and a dense decoder tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.gated = bg.DynamicSparseLinear(64, 64, block_size=16, sparsity=0.5)
        self.again = self.gated
        self.decoder = nn.Linear(64, 40)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        h = torch.tanh(self.gated(self.embedding(tokens)))
        return self.decoder(self.again(h))


def relative(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"select": "per_row", "normalise": "rms"}, {"gate_hidden": 8}], ids=str)
def test_a_packed_layer_is_close_and_opens_the_same_blocks(dtype, options):
    layer = bg.DynamicSparseLinear(300, 200, block_size=32, sparsity=0.75, **options).eval()
    packed = bg.pack(layer, dtype)
    assert isinstance(packed, PackedDynamicSparseLinear)
    x = torch.randn(50, 300)
    with torch.no_grad():
        assert relative(packed(x), layer(x)) < ERROR[dtype]
        torch.testing.assert_close(packed.gates(x), layer.gates(x), rtol=0, atol=0)
        torch.testing.assert_close(packed(x[7]), packed(x)[7], rtol=0, atol=0)
        if dtype == "float32":
            torch.testing.assert_close(packed(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [{"gate": "softmax_sum"}, {"gate": "sigmoid", "sparsity": 0}], ids=str)
def test_other_gate_kinds_pack_too(dtype, gate):
    layer = bg.DynamicSparseLinear(48, 32, block_size=16, **gate).eval()
    x = torch.randn(9, 48)
    with torch.no_grad():
        assert relative(bg.pack(layer, dtype)(x), layer(x)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_plain_linear_layers_pack(dtype, bias):
    linear = nn.Linear(333, 77, bias=bias)
    packed = bg.pack(linear, dtype)
    assert isinstance(packed, PackedLinear)
    for rows in (0, 1, 5, 40):
        x = torch.randn(rows, 333)
        with torch.no_grad():
            want = linear(x)
            assert rows == 0 or relative(packed(x), want) < ERROR[dtype]
            assert packed(x).shape == want.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_linear_layer_prepared_for_native_calls_computes_the_same_and_is_never_stale(dtype):
    packed = bg.pack(nn.Linear(150, 40), dtype)
    other = bg.pack(nn.Linear(150, 40), dtype)

    def zero_bias():
        packed.bias.zero_()

    def zero_scale_or_blocks():
        (packed.packed.scale if packed.packed.scale.numel() else packed.packed.blocks).zero_()

    def load():
        packed.load_state_dict(other.state_dict())

    def assign():
        packed.bias = nn.Parameter(torch.ones(40), requires_grad=False)

    x = torch.randn(7, 3, 150)
    changes = [lambda: None, zero_bias, load, assign, zero_scale_or_blocks, packed.double]
    with torch.no_grad():
        for change in changes:
            change()
            with forward_ad.dual_level():  # not for native calls: the plain op computes it
                want = packed(x)
            for got in (packed(x), packed(x.transpose(0, 1)).transpose(0, 1), packed(x[:, 0])[:, None]):
                torch.testing.assert_close(got, want[:, : got.shape[1]], rtol=0, atol=0)
        with raises_blockgate("150"):
            packed(x[..., 1:])


def test_traces_hold_no_number_of_a_prepared_layer():
    packed = bg.pack(nn.Linear(32, 16))
    x = torch.randn(2, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls tracing old
        packed(x)  # prepares it
        traced = torch.jit.trace(packed, x)
        assert "prepared" not in str(traced.inlined_graph)
        assert_close(traced(x), packed(x))
        graph = make_fx(packed)(x)
        assert "prepared" not in graph.code


def test_pruned_biases_are_read():
    packed = prune.random_unstructured(bg.pack(nn.Linear(32, 16)), "bias", 0.5)
    x = torch.randn(2, 32)
    with torch.no_grad():
        assert_close(packed(x), x @ packed.packed.weight().t() + packed.bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_model(dtype):
    net = Net().eval()
    tokens = torch.randint(40, (3, 7))
    packed = bg.pack(net, dtype)
    assert packed.again is packed.gated
    assert isinstance(packed.decoder, PackedLinear)
    with torch.no_grad():
        assert relative(packed(tokens), net(tokens)) < 3 * ERROR[dtype]
    assert isinstance(net.gated, bg.DynamicSparseLinear)
    assert not any(p.requires_grad for p in packed.parameters())
    assert all(p.requires_grad for p in net.parameters())


def test_a_packed_model_shares_nothing_with_its_source():
    net = nn.Sequential(bg.DynamicSparseLinear(32, 32, block_size=8), nn.Linear(32, 8)).eval()
    packed, x = bg.pack(net), torch.randn(4, 32)
    with torch.no_grad():
        before = packed(x)
        for parameter in net.parameters():
            parameter.fill_(7.0)
        torch.testing.assert_close(packed(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_packed_and_unpacked(dtype, tmp_path):
    source, other = Net().eval(), Net().eval()
    bg.set_sparsity(source, 0.75)
    packed, tokens = bg.pack(source, dtype), torch.randint(40, (2, 5))
    state = packed.state_dict()
    assert {"gated.packed.blocks", "gated.packed.scale", "gated.packed.version", "gated.gate.weight"} <= set(state)
    assert state["gated.gate.weight"].dtype == torch.float32
    # A file holds no tensor twice, so the second name of the shared layer stays out.
    save_file({k: v for k, v in state.items() if not k.startswith("again.")}, tmp_path / "packed.safetensors")
    with torch.no_grad():
        want = packed(tokens)
        reloaded = bg.pack(other, dtype)
        reloaded.load_state_dict(load_file(tmp_path / "packed.safetensors"), strict=False)
        torch.testing.assert_close(reloaded(tokens), want, rtol=0, atol=0)
        assert reloaded.gated.sparsity == 0.75
        anew = bg.pack(Net().eval(), dtype)
        result = anew.load_state_dict(source.state_dict(), strict=False)
        assert result.unexpected_keys == []
        torch.testing.assert_close(anew(tokens), want, rtol=0, atol=0)


def test_unpacking_gives_the_weight_back():
    linear = nn.Linear(70, 50)
    torch.testing.assert_close(bg.pack(linear).packed.weight(), linear.weight.data, rtol=0, atol=0)
    assert relative(bg.pack(linear, torch.int8).packed.weight(), linear.weight.data) < 0.01


def test_torch_dtypes_name_their_formats():
    linear, x = nn.Linear(40, 30), torch.randn(3, 40)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            by_name = bg.pack(linear, str(dtype).removeprefix("torch."))
            torch.testing.assert_close(bg.pack(linear, dtype)(x), by_name(x), rtol=0, atol=0)


def test_filter_keeps_layers_out():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    packed = bg.pack(net, filter_fn=lambda _, name: name == "1")
    assert isinstance(packed[0], nn.Linear)
    assert isinstance(packed[1], PackedLinear)


def test_half_inputs_are_computed_in_float32():
    packed = bg.pack(nn.Linear(32, 16), torch.int8)
    x = torch.randn(3, 32).bfloat16()
    with torch.no_grad():
        y = packed(x)
        assert y.dtype == torch.bfloat16
        assert_close(y, packed(x.float()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_casting_a_packed_model_changes_no_bit(dtype):
    packed = bg.pack(bg.DynamicSparseLinear(32, 32, block_size=8), dtype)
    x = torch.randn(2, 32)
    with torch.no_grad():
        want = packed(x)
        for cast in (packed.half, packed.bfloat16, packed.double):
            cast()
            torch.testing.assert_close(packed(x), want, rtol=0, atol=0)


def test_a_dense_checkpoint_of_another_size_is_refused():
    packed = bg.pack(nn.Linear(100, 200, bias=False))  # ragged edges: 250 outputs would fill the same blocks
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: expected \(200, 100\), got \(250, 100\)"):
        packed.load_state_dict(nn.Linear(100, 250, bias=False).state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_s_transformer_really_runs_its_packed_layers(dtype):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
    ).eval()
    encoder.layers[0].linear1 = bg.DynamicSparseLinear(64, 64, block_size=16, sparsity=0.5).eval()
    packed, x = bg.pack(encoder, dtype), torch.randn(2, 5, 64)
    want = encoder(x)  # with gradients on, torch takes no shortcut
    with torch.no_grad():
        assert relative(packed(x), want) < 3 * ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_meta_models_pack_and_load(dtype):
    with torch.device("meta"):
        layer = bg.DynamicSparseLinear(32, 32, block_size=8)
    packed = bg.pack(layer, dtype)
    source = bg.pack(bg.DynamicSparseLinear(32, 32, block_size=8), dtype)
    packed.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), source(x), rtol=0, atol=0)


def test_layers_with_hooks_stay_as_they_are():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].register_forward_hook(lambda *_: None)
    assert isinstance(bg.pack(net)[0], nn.Linear)


def test_packed_models_stay_in_eval_and_follow_autocast():
    packed = bg.pack(bg.DynamicSparseLinear(16, 16, block_size=4, gate="softmax_sum"))
    packed.train()
    assert not packed.gate.training
    linear = bg.pack(nn.Linear(16, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert linear(torch.randn(2, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_models_compile_and_export(dtype):
    packed, x = bg.pack(bg.DynamicSparseLinear(32, 32, block_size=8), dtype), torch.randn(2, 32)
    with torch.no_grad():
        want = packed(x)
        assert_close(torch.compile(packed, backend="aot_eager", fullgraph=True)(x), want)
        assert_close(torch.export.export(packed, (x,)).module()(x), want)


def test_bad_requests_are_refused():
    with raises_blockgate("format: expected one of 'bfloat16', 'float16', 'float32', 'int4', 'int8'"):
        bg.pack(nn.Linear(2, 2), torch.float64)
    with raises_blockgate("pack: expected a model with layers to pack, got 'ReLU'"):
        bg.pack(nn.ReLU())
    broken = nn.Linear(4, 4)
    nn.init.constant_(broken.weight, float("nan"))
    for name in ("int8", "int4"):
        with raises_blockgate(f"weight: expected finite values for {name}, got 'NaN or inf'"):
            bg.pack(broken, name)
    large = nn.Linear(4, 4)
    nn.init.constant_(large.weight, -1e5)
    with raises_blockgate("weight: expected numbers up to 65504 for float16, got '100000'"):
        bg.pack(large, torch.float16)
    packed = bg.pack(bg.DynamicSparseLinear(8, 4, block_size=2))
    with raises_blockgate("input: expected shape (..., 8), got (2, 7)"):
        packed(torch.ones(2, 7))
    with raises_blockgate("packed layer: expected an input without gradient"):
        packed(torch.ones(2, 8, requires_grad=True))
    with raises_blockgate("input: expected a tensor on cpu, as the layer's blocks, got 'meta'"):
        packed(torch.ones(2, 8, device="meta"))
    with raises_blockgate("input: expected a dense floating tensor, got 'torch.strided of torch.int64'"):
        packed(torch.ones(2, 8, dtype=torch.int64))
    with raises_blockgate("pack: expected an nn.Module, got 'NoneType'"):
        bg.pack(None)
    with raises_blockgate("pack: expected a model whose parameters exist, got 'lazy layers'"):
        bg.pack(nn.LazyLinear(4))


def test_wrong_checkpoints_are_refused_and_change_nothing():
    packed = bg.pack(nn.Linear(8, 4), torch.int8)
    before = packed.packed.blocks.clone()
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("int4", torch.uint8)):
        other = bg.pack(nn.Linear(8, 4), name).state_dict()
        with raises_blockgate(f"packed.blocks: expected torch.int8, as this model was packed to, got {dtype}"):
            packed.load_state_dict(other)
    future = packed.state_dict() | {"packed.version": torch.tensor(99)}
    with raises_blockgate("packed.version: expected packed format 2 or 1, got 99"):
        packed.load_state_dict(future)
    torch.testing.assert_close(packed.packed.blocks, before)
