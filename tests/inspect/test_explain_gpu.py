"""What `plan` and `explain` say of GPU tensors, without a GPU: tensors with shapes and types only."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockgate as bg
from blockgate.runtime import packed_columns, plan
from blockgate.runtime.plan import OPS, REFERENCE
from tests.inspect.test_explain import OPTIONS, linear, lstm

pytest.importorskip("triton")


def wide(**options):
    """Rows of blocks with more columns than GPU kernels select from at once."""
    return bg.DynamicSparseLinear(16400, 2, block_size=1, **options).eval()


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        (linear, OPS, plan.SUBCLASS),
        (lambda: linear().double(), REFERENCE, plan.GPU_TYPE),
        (lambda: lstm().double(), REFERENCE, plan.GPU_TYPE),
        (lambda: bg.DynamicSparseGRU(16, 16, **OPTIONS).eval(), OPS, plan.SUBCLASS),
        (wide, REFERENCE, plan.GPU_GROUP),
        (lambda: wide(gate="norm"), REFERENCE, plan.GPU_GROUP),
        (lambda: bg.pack(linear(), "int8"), OPS, plan.SUBCLASS),
        (lambda: bg.pack(linear(), "int8a8"), REFERENCE, plan.GPU_FORMAT),
        (lambda: bg.pack(lstm(), "int8a8"), REFERENCE, plan.GPU_FORMAT),
        (lambda: bg.pack(wide()), REFERENCE, plan.GPU_GROUP),
        (lambda: bg.pack(linear(gate="norm", block_size=(8, 1))), REFERENCE, packed_columns.GPU_COLUMNS),
    ],
)
def test_what_runs_on_a_gpu(make, path, reason):
    """What `plan` says of GPU tensors without a GPU: tensors with shapes and types only."""
    model = make()
    size = getattr(model, "in_features", None) or model.input_size
    dtype = next(iter(model.parameters())).dtype
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 3, size, device="cuda", dtype=dtype)
        found = model.plan(x)
    assert found[:3] == (path, *reason)


def test_the_type_of_a_packed_layers_input_does_not_matter_on_a_gpu():
    model = bg.pack(linear())
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        assert model.plan(torch.empty(3, 32, device="cuda", dtype=torch.float64)).path == OPS
