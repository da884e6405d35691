"""What is saved comes back: outputs, options, types, ties, sparsities, for many models."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import blockgate as bg
from blockgate.checkpoint.layers import describe_layers
from tests.helpers import raises_blockgate
from tests.model_zoo import EACH, TiedLM, encoder, gpt2, run, sequence, tokens


def convert(model: nn.Module, **options) -> nn.Module:
    bg.sparsify_(model, **{"block_size": 16, "sparsity": 0.75, **options})
    return model.eval()


def parameter_ids(model: nn.Module) -> dict[str, int]:
    return {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}


def shared(model: nn.Module) -> set[frozenset[str]]:
    """The groups of names that share one parameter."""
    groups: dict[int, set[str]] = {}
    for name, number in parameter_ids(model).items():
        groups.setdefault(number, set()).add(name)
    return {frozenset(names) for names in groups.values()}


@EACH
def test_into_the_dense_model_its_constructor_or_a_sparse_one(case, tmp_path):
    model, example = convert(case.make()), case.example()
    bg.save_pretrained(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with torch.no_grad():
        want = run(model, example)
        for target in (case.make().eval(), case.make, lambda: convert(case.make(), sparsity=0.25)):
            loaded = bg.load_pretrained(tmp_path, target).eval()
            torch.testing.assert_close(run(loaded, example), want, rtol=0, atol=0)
            assert shared(loaded) == shared(model)
            assert describe_layers(loaded) == describe_layers(model)


@EACH
def test_gates_alone_on_the_dense_model(case, tmp_path):
    dense, example = case.make().eval(), case.example()
    state = {key: value.clone() for key, value in dense.state_dict().items()}
    model = convert(dense)
    for name, parameter in model.named_parameters():
        if "gate" in name:
            nn.init.normal_(parameter)
    bg.save_pretrained(model, tmp_path / "gates", gates_only=True)
    bg.save_pretrained(model, tmp_path / "all")
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("gates", "all")]
    assert sizes[0] < 0.5 * sizes[1]
    pretrained = case.make().eval()
    pretrained.load_state_dict(state)
    loaded = bg.load_pretrained(tmp_path / "gates", pretrained)
    with torch.no_grad():
        torch.testing.assert_close(run(loaded, example), run(model, example), rtol=0, atol=0)


def test_gates_alone_need_the_weights_they_were_saved_beside(tmp_path):
    dense = encoder(batch_first=True)
    bg.save_pretrained(convert(dense), tmp_path, gates_only=True)
    other = encoder(batch_first=True)
    before = list(other.modules())
    with raises_blockgate("model: expected the weights beside which the gates were saved"):
        bg.load_pretrained(tmp_path, other)
    assert list(other.modules()) == before
    loaded = bg.load_pretrained(tmp_path, other.bfloat16(), strict=False)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    with torch.device("meta"), raises_blockgate("model: expected the dense model with its weights, got 'meta tensors'"):
        bg.load_pretrained(tmp_path, encoder(batch_first=True))
    with raises_blockgate("gates_only: expected a model with gated layers"):
        bg.save_pretrained(encoder(batch_first=True), tmp_path, gates_only=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_kept_and_parameters_stay_the_same_objects(dtype, tmp_path):
    model = convert(TiedLM()).to(dtype).eval()
    bg.save_pretrained(model, tmp_path)
    target = TiedLM().eval()
    weight = target.block[0].weight
    loaded = bg.load_pretrained(tmp_path, target)
    assert loaded is target
    assert loaded.block[0].weight is weight
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    example = tokens()
    torch.testing.assert_close(loaded(example), model(example), rtol=0, atol=0)


def test_ties_come_back_even_if_the_model_does_not_tie(tmp_path):
    class Untied(TiedLM):
        def __init__(self) -> None:
            super().__init__()
            self.decoder.weight = nn.Parameter(self.embedding.weight.detach().clone())

    model = convert(TiedLM())
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, Untied())
    assert loaded.decoder.weight is loaded.embedding.weight
    bg.save_pretrained(convert(Untied()), tmp_path)
    target = TiedLM()
    before = list(target.modules())
    with raises_blockgate("parameters 'embedding.weight' and 'decoder.weight': expected two, as in the checkpoint"):
        bg.load_pretrained(tmp_path, target)
    assert list(target.modules()) == before


def test_meta_models_take_weights_and_ties(tmp_path):
    model = convert(TiedLM())
    bg.save_pretrained(model, tmp_path)
    with torch.device("meta"):
        target = TiedLM()
    loaded = bg.load_pretrained(tmp_path, target).eval()
    assert loaded.decoder.weight is loaded.embedding.weight
    example = tokens()
    torch.testing.assert_close(loaded(example), model(example))
    with torch.device("meta"):
        target.register_buffer("clock", torch.zeros(1), persistent=False)
    with raises_blockgate("buffer 'clock': expected values, which checkpoints don't hold"):
        bg.load_pretrained(tmp_path, target)


def test_sparsities_of_single_gates_come_back(tmp_path):
    model = convert(encoder(batch_first=True))
    bg.set_sparsity(model, {"layers.0.linear1": 0.25, "layers.1.*": 0.9})
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, lambda: encoder(batch_first=True))
    assert [loaded.layers[i].linear1.sparsity for i in (0, 1)] == [0.25, 0.9]


def test_a_registered_model_needs_no_hand(tmp_path):
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    bg.checkpoint.register_model("test-mlp", make)
    bg.checkpoint.register_model("test-mlp", make)
    with raises_blockgate("register_model: expected a name that is free, got 'test-mlp'"):
        bg.checkpoint.register_model("test-mlp", nn.Sequential)
    model = convert(make(32))
    bg.save_pretrained(model, tmp_path, constructor="test-mlp", constructor_options={"width": 32})
    x = torch.randn(2, 32)
    torch.testing.assert_close(bg.load_pretrained(tmp_path)(x), model(x), rtol=0, atol=0)
    with raises_blockgate("constructor: expected a registered model: ["):
        bg.save_pretrained(model, tmp_path, constructor="unknown")
    for width in ((3, 2), torch.float32):
        with raises_blockgate("constructor_options: expected keyword arguments that JSON can hold"):
            bg.save_pretrained(model, tmp_path, constructor="test-mlp", constructor_options={"width": width})


@given(
    sizes=st.tuples(st.integers(2, 40), st.integers(2, 40), st.integers(2, 40)),
    block=st.integers(1, 20),
    sparsity=st.floats(0, 0.99),
    later=st.floats(0, 0.99),
    gate=st.sampled_from(["topk", "softmax_sum"]),
    key=st.sampled_from([..., None, 2]),
    hidden=st.sampled_from([None, 3]),
)
def test_the_description_makes_the_same_layer_again(sizes, block, sparsity, later, gate, key, hidden):
    options = {"block_size": block, "sparsity": sparsity, "gate": gate, "key_size": key, "gate_hidden": hidden}
    model = nn.ModuleDict({
        "linear": bg.DynamicSparseLinear(sizes[0], sizes[1], **options),
        "qrnn": bg.DynamicSparseQRNN(sizes[0], sizes[2], 2, window=1, **options),
    })
    bg.set_sparsity(model, max(sparsity, later))
    described = json.loads(json.dumps(describe_layers(model)))
    made = {
        "linear": bg.DynamicSparseLinear(sizes[0], sizes[1], **described["linear"]["options"]),
        "qrnn": bg.DynamicSparseQRNN(sizes[0], sizes[2], 2, window=1, **described["qrnn"]["options"]),
    }
    for name, layer in made.items():
        layer.load_state_dict(model[name].state_dict())
        assert [p.shape for p in layer.parameters()] == [p.shape for p in model[name].parameters()]


@pytest.mark.parametrize("key_size", [..., None, 32])
def test_keys_of_several_sizes_in_one_layer(key_size, tmp_path):
    def make() -> nn.Module:
        return nn.Sequential(bg.layers.QRNN(64, 160, 2, window=1))

    model = make()
    bg.sparsify_(model, block_size=64, key_size=key_size)
    bg.save_pretrained(model, tmp_path)
    sizes = [f.gate.key_size for f in bg.load_pretrained(tmp_path, make)[0].filters]
    assert sizes == {...: [64, 128], None: [64, 160], 32: [32, 32]}[key_size]


def test_gates_with_options_of_their_own_are_refused(tmp_path):
    qrnn = bg.DynamicSparseQRNN(32, 32, 2, block_size=16)
    qrnn.filters[1] = bg.DynamicSparseLinear(64, 96, block_size=8)
    with raises_blockgate("DynamicSparseQRNN: expected the same options for all gates of one layer"):
        bg.save_pretrained(qrnn, tmp_path)
    assert not list(tmp_path.iterdir())


def test_gpt2_in_half_precision_with_its_ties(tmp_path):
    model = convert(gpt2()).bfloat16()
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, gpt2).eval()
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.dtype == torch.bfloat16
    example = tokens()
    with torch.no_grad():
        torch.testing.assert_close(loaded(example).logits, model(example).logits, rtol=0, atol=0)


def test_a_compiled_model_saves_as_the_model_inside(tmp_path):
    model = convert(encoder(batch_first=True))
    bg.save_pretrained(torch.compile(model, backend="aot_eager"), tmp_path)
    loaded = bg.load_pretrained(tmp_path, lambda: encoder(batch_first=True)).eval()
    x = sequence()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


def test_tensors_that_overlap_are_saved_apart(tmp_path):
    memory = torch.randn(64, 32)

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 48))
        for layer, start in zip(model, (0, 16), strict=True):
            layer.weight = nn.Parameter(memory[start : start + 48])
        return model

    model = convert(make(), filter_fn=lambda *_: True)
    bg.save_pretrained(model, tmp_path)
    loaded = bg.load_pretrained(tmp_path, lambda: nn.Sequential(nn.Linear(32, 48), nn.Linear(32, 48)))
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_single_layer(tmp_path):
    # In training, gates would count what they see.
    layer = bg.DynamicSparseLinear(32, 48, block_size=16).eval()
    bg.save_pretrained(layer, tmp_path)
    x = torch.randn(2, 32)
    for target in (nn.Linear(32, 48), bg.DynamicSparseLinear(32, 48, block_size=16)):
        loaded = bg.load_pretrained(tmp_path, target).eval()
        assert loaded.weight is target.weight
        torch.testing.assert_close(loaded(x), layer(x), rtol=0, atol=0)
