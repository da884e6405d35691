"""What else a gated model does where its layers run Triton kernels: every check compares with a twin on the reference.

For the interpreter (`device="cpu"`) and for a GPU alike.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

import blockgate as bg
from blockgate.gates import Gate
from tests.helpers import TOLERANCE

if TYPE_CHECKING:
    from pathlib import Path

COMPARED: Counter[str] = Counter()


def same(what: str, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal within the tolerance of `dtype`, in units of the largest value."""
    rtol, atol = TOLERANCE[dtype]
    actual, expected = actual.detach().float(), expected.detach().float()
    atol *= max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")
    COMPARED[what] += 1


def to_backend(model: nn.Module, backend: str) -> nn.Module:
    """The model, with all gates and products on one backend."""
    for module in model.modules():
        if isinstance(module, Gate):
            module.spec = replace(module.spec, backend=backend)
    return model


def gated_model(device: str, backend: str, sparsity: float = 0.5) -> nn.Module:
    """Two gated layers, always of the same weights, gates as `sparsify_` makes them."""
    torch.manual_seed(2)
    dense = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 20)).to(device)
    options = {"block_size": (16, 8), "backend": backend, "filter_fn": lambda *_: True}
    bg.sparsify_(dense, sparsity=sparsity, **options)
    return dense


def twins(device: str, sparsity: float = 0.5) -> tuple[nn.Module, nn.Module]:
    """The same model on Triton's kernels and on the reference."""
    ours, theirs = gated_model(device, "triton", sparsity), gated_model(device, "reference", sparsity)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def rows(device: str, count: int = 5, size: int = 40) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(count, size, device=device)


def check_training(device: str) -> None:
    """Two steps of training under a ramp: parameters, running means and sparsity end the same."""
    ended = []
    x = rows(device, 20)
    for model in twins(device, 0.0):
        ramp = bg.SparsityRamp(model, final=0.75, begin=0, end=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            model.train()(x).square().mean().backward()
            optimizer.step()
            ramp.step()
        assert model[0].sparsity == 0.75
        ended.append(model.eval()(x))
        ended.append(torch.cat([t.flatten() for t in (*model.parameters(), *model.buffers())]))
    same("trained model", ended[0], ended[2])
    same("trained parameters and means", ended[1], ended[3])


def check_reports(device: str) -> None:
    """What `record_gates` counts and `summary` says."""
    x, found = rows(device, 20), []
    for model in twins(device):
        with torch.no_grad(), bg.record_gates(model.eval()) as record:
            model(x)
        shares = [(gate.frequency(), gate.measured_density) for gate in record.gates.values()]
        summed = bg.summary(model, x)
        found.append((shares, record.distribution(), (summed.macs_now, summed.gate_parameters)))
    for (share, density), (expected, expected_density) in zip(found[0][0], found[1][0], strict=True):
        same("share of rows that open each block", share, expected)
        assert density == expected_density
    assert found[0][1:] == found[1][1:]


def check_saving(device: str, folder: Path) -> None:
    """A checkpoint of a model gives the same outputs again."""
    ours, _ = twins(device)
    x = rows(device)
    with torch.no_grad():
        want = ours.eval()(x)
        bg.save_pretrained(ours, folder)
        dense = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 20)).to(device)
        loaded = to_backend(bg.load_pretrained(folder, dense), "triton").eval()
        same("loaded model", loaded(x), want)


def check_packing(
    device: str,
    formats: tuple[str, ...] = ("bfloat16", "float16", "int8", "int4"),
    count: int = 3,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Packed models, against the weights that their blocks stand for."""
    ours, theirs = twins(device)
    x = rows(device, count).to(dtype)
    with torch.no_grad():
        for name in formats:
            packed = bg.pack(ours.eval(), name)
            assert {row.path for row in bg.explain(packed, x).layers} == {"separate ops"}
            theirs[0].weight.copy_(packed[0].packed.weight())
            got = packed[0](x)
            assert got.dtype is dtype
            # The first layer only: a rounded input may open other blocks of the second.
            same(f"packed {name}", got, theirs[0].eval()(x.float()), dtype)


LAYERS = {
    "linear": lambda device: bg.DynamicSparseLinear(40, 44, block_size=(16, 7), backend="triton", device=device),
    "lstm": lambda device: bg.DynamicSparseLSTM(40, 12, block_size=(16, 5), backend="triton", device=device),
    "gru": lambda device: bg.DynamicSparseGRU(40, 12, block_size=(12, 5), backend="triton", device=device),
    "qrnn": lambda device: bg.DynamicSparseQRNN(40, 12, block_size=(16, 7), backend="triton", device=device),
}


def check_half_precision(kind: str, device: str, dtype: torch.dtype, autocast: bool) -> None:
    """A layer in half precision, or under autocast, next to itself in float32; its gradients are finite numbers."""
    torch.manual_seed(4)
    layer = LAYERS[kind](device).eval()
    x = rows(device, 6).view(2, 3, 40)
    if not autocast:
        layer, x = layer.to(dtype), x.to(dtype)
    with torch.no_grad():
        wide = to_backend(LAYERS[kind](device).eval(), "reference")
        wide.load_state_dict({name: t.float() for name, t in layer.state_dict().items()})
        want = wide(x.float())
    with torch.autocast(device, dtype, enabled=autocast):
        got = layer(x)
    got, want = (y[0] if isinstance(y, tuple) else y for y in (got, want))
    assert got.dtype is dtype
    same(f"{kind} in half precision", got, want, dtype)
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    assert layer.get_parameter(next(n for n, _ in layer.named_parameters() if "weight" in n)).grad.abs().sum() > 0
