"""Files that version 0.1 wrote still load, and compute what they computed then."""

from __future__ import annotations

import pytest
import torch

import blockgate as bg
from tests.checkpoint.files_0_1.make import FOLDER, MODELS, PACKED, inputs, run

# What later versions keep besides.
NEWER = {"0.gate.temperature"}


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints(name):
    model = bg.load_pretrained(FOLDER / name, MODELS[name][0]).eval()
    torch.testing.assert_close(run(model, inputs()[name]), torch.load(FOLDER / name / "expected.pt"))


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("name", MODELS)
def test_packed_models(name, dtype):
    dense, options = MODELS[name]
    model = dense()
    bg.sparsify_(model, **options)
    packed = bg.pack(model, PACKED[dtype])
    saved = torch.load(FOLDER / name / f"packed-{dtype}.pt")
    packed.load_state_dict(saved["state"])
    torch.testing.assert_close(run(packed, inputs()[name]), saved["expected"])
    assert packed.state_dict().keys() - NEWER == saved["state"].keys()


def test_names_at_the_top():
    for name in ("QRNN", "BlockGrid", "weight_drop_", "gate_losses", "register_model", "SparsifyReport"):
        with pytest.warns(DeprecationWarning, match=f"blockgate.{name} has moved: use blockgate"):
            assert getattr(bg, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'blockgate' has no attribute 'nothing'"):
        _ = bg.nothing
