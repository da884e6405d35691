"""Each callback names the package that it needs."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.helpers import raises_blockgate


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("lightning", "lightning.pytorch", "pip install 'blockgate[train]'"),
        ("huggingface", "transformers", "pip install transformers"),
    ],
)
def test_a_missing_package_is_named(module, package, command, monkeypatch):
    monkeypatch.delitem(sys.modules, f"blockgate.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with raises_blockgate(command):
        importlib.import_module(f"blockgate.integrations.{module}")
