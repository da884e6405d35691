from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import blockgate as bg
from blockgate.cli import main


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"blockgate {bg.__version__}\n"


def test_info_names_versions_backend_and_threads(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in (bg.__version__, torch.__version__, "backend", "instruction set", "threads"):
        assert word in out


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("args", [["info", "--nonsense"], ["nonsense"]])
def test_wrong_words_end_with_code_2(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--help"], ["info", "--help"]])
def test_help_explains(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 0
    assert "blockgate" in capsys.readouterr().out


def test_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "blockgate", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"blockgate {bg.__version__}\n"


def test_without_tyro_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == ("blockgate: the command line needs tyro. Run: pip install 'blockgate[train]'\n")
