"""`sparsify_` among PyTorch's own tools: examples that fail, types, meta models, torch.compile, data parallel."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.layers import DynamicSparseConv1D
from tests.model_zoo import encoder, gpt2, sequence, tokens


def convert(model: nn.Module, **options: Any) -> bg.convert.SparsifyReport:
    return bg.sparsify_(model, **{"block_size": 16, **options})


def test_an_example_that_fails_changes_nothing():
    class Moody(nn.Module):
        """Works as long as its layer is dense."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(encoder(batch_first=True))

        def forward(self, x):
            assert type(self.body[0].layers[0].linear1) is nn.Linear
            return self.body(x)

    model = Moody().train()
    before = list(model.modules())
    with pytest.raises(AssertionError):
        convert(model, example_input=sequence())
    assert list(model.modules()) == before
    assert model.training
    assert model.body[0].use_nested_tensor
    assert model.body[0].layers[1].activation_relu_or_gelu == 1
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_whose_weight_is_read_around_it_is_reported():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return nn.functional.linear(self.called(x), self.read.weight)

    report = convert(Around(), example_input=torch.randn(2, 32))
    assert report.not_run == ("read",)
    assert "warning: the example input never ran read" in str(report)


def test_examples_of_every_form():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(32, 32)

        def forward(self, x, scale=1.0, *, shift=0.0):
            data = x.data if isinstance(x, nn.utils.rnn.PackedSequence) else x
            return {"y": [self.body(data) * scale + shift], "steps": 3, "mask": torch.ones(2, dtype=torch.int64)}

    x = torch.randn(2, 32)
    packed = nn.utils.rnn.pack_sequence([x])
    for example in (x, (x,), (x, 2.0), {"x": x, "shift": 1.0}, packed, (packed,)):
        assert 0 < convert(Named(), example_input=example).relative_difference < 0.05


def test_a_model_in_training_keeps_no_packed_copies():
    model = encoder(batch_first=True).train()
    convert(model, example_input=sequence())
    assert model.layers[0].linear1._copy._state is None


class Silent(nn.Sequential):
    """Computes and returns nothing."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32))

    def forward(self, x):
        assert x is not None


def test_bad_examples():
    with pytest.raises(bg.errors.InvalidInputError, match="returns floating tensors with values, got 'NoneType'"):
        convert(Silent(), example_input=torch.ones(1))
    with pytest.raises(bg.errors.InvalidInputError, match="opens at most the 2 heads"):
        convert(nn.Sequential(nn.Linear(32, 32)), gate="softmax_sum", example_input=torch.randn(2, 32))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(bg.errors.InvalidInputError, match="got 'a tensor on the meta device'"):
        convert(model, example_input=torch.randn(2, 32, device="meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gates_follow_the_type_of_the_model_before_or_after(dtype):
    before, after = encoder(batch_first=True).to(dtype), encoder(batch_first=True)
    convert(before)
    convert(after)
    after.to(dtype)
    for model in (before, after):
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model(sequence().to(dtype)).dtype == dtype


def test_meta_models_convert_and_take_weights():
    with torch.device("meta"):
        model = gpt2()
    convert(model)
    assert all(p.is_meta for p in model.parameters())
    source = gpt2().eval()
    convert(source)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(source.state_dict())
    example = tokens()
    for name, buffer in source.named_buffers():
        model.get_buffer(name).copy_(buffer)
    with torch.no_grad():
        torch.testing.assert_close(model(example).logits, source(example).logits)


def test_frozen_layers_stay_frozen_and_their_gates_train():
    model = encoder(batch_first=True).requires_grad_(False)
    convert(model)
    model(sequence()).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if ".gate." in name
    }


def test_under_torch_compile_before_and_after():
    model, x = encoder(batch_first=True).eval(), sequence()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    convert(compiled, sparsity=0.75)
    assert isinstance(model.layers[0].linear1, bg.DynamicSparseLinear)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))
    bg.set_sparsity(model, 0.0)
    torch.testing.assert_close(compiled(x), model(x))


def test_gpt2_keeps_its_transposed_weights_and_generates():
    model = gpt2().eval()
    weight = model.transformer.h[0].mlp.c_fc.weight
    convert(model)
    layer = model.transformer.h[0].mlp.c_fc
    assert type(layer) is DynamicSparseConv1D
    assert layer.weight is weight
    assert layer.weight.shape == (layer.in_features, layer.out_features)
    generated = model.generate(tokens()[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    packed = bg.pack(model)
    packed.load_state_dict(model.state_dict())  # unpacked weights, stored as (in, out), are packed anew
    again = packed.generate(generated[:, :6], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert again.tolist() == generated.tolist()


DATA_PARALLEL = """
import sys, torch, blockgate as bg
from torch import nn
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
bg.sparsify_(model, block_size=16)
parallel = nn.parallel.DistributedDataParallel(model)
try:
    bg.sparsify_(parallel)
except bg.errors.BlockgateError as error:
    assert "DistributedDataParallel" in str(error)
else:
    raise SystemExit("a wrapped model was converted")
optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
torch.manual_seed(int(sys.argv[2]))  # each process has data of its own
losses = []
x = torch.randn(8, 32)
for _ in range(5):
    loss = (parallel(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
for parameter in model.parameters():
    other = parameter.detach().clone()
    torch.distributed.broadcast(other, 0)
    torch.testing.assert_close(parameter.detach(), other, rtol=0, atol=0)
torch.distributed.destroy_process_group()
"""


def test_data_parallel_training_keeps_gates_in_step(tmp_path):
    command = [sys.executable, "-c", DATA_PARALLEL, str(tmp_path / "store")]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        output, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0, output
