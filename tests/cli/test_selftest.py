"""`blockgate selftest`: what it runs, prints and says of mistakes."""

from __future__ import annotations

import json

import pytest

from blockgate.cli import main


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--minutes", "0"], "--minutes: expected more than 0"),
        (["--comparisons", "-1"], "--comparisons: expected a positive int"),
        (["--isa", "mmx"], "--isa: expected one of all, avx512vnni, avx512, avx2, baseline"),
        (["--seed", "-1"], "--seed: expected a number from 0"),
    ],
)
def test_mistakes_are_one_line(words, complaint, capsys):
    assert main(["selftest", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_few_comparisons_on_the_lowest_instruction_set(tmp_path, capsys):
    output = tmp_path / "selftest.json"
    assert main(["selftest", "--comparisons", "60", "--isa", "baseline", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    result = found["results"]["baseline"]
    assert result["status"] == "passed"
    assert result["comparisons"] >= 60
    assert found["machine"]["cpu"]
    table = capsys.readouterr().out
    assert "| baseline | passed |" in table
    assert "float32" in table
