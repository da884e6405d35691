"""The atlas holds what was recorded, asks nothing of other hosts, and refuses what it can't show."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import resources

import pytest
import torch
from torch import nn

import blockgate as bg
from blockgate.inspect import atlas
from tests.helpers import raises_blockgate
from tests.inspect.atlas_page import HISTORY, lstm_record, numbers, read_page
from tests.inspect.helpers import inputs, layer_that_opens, run_and_fail, small_net
from tests.model_zoo import gpt2, tokens

WORDS = ["the", "gate", "opens", "the", "block", "and", "the", "block", "is", "read"]


@pytest.fixture
def record():
    return lstm_record(WORDS)


def test_counts_values_and_traces_are_those_of_the_record(record, tmp_path):
    page = read_page(record.to_html(tmp_path / "atlas.html", tokens=WORDS))
    assert page["tokens"] == WORDS
    assert [gate["name"] for gate in page["gates"]] == ["ih_l0", "hh_l0", "ih_l1", "hh_l1"]
    for shown in page["gates"]:
        gate = record.gates[shown["name"]]
        assert shown["grid"] == [gate.grid.out_blocks, gate.grid.in_blocks]
        assert shown["block"] == [16, 8]
        assert shown["features"] == [192, 48]
        often = numbers(shown["frequency"], torch.uint16).double() / 65535
        torch.testing.assert_close(often, gate.frequency().flatten(), rtol=0, atol=1e-5)
        mean = gate.value_sum / gate.open_counts.clamp(min=1)
        torch.testing.assert_close(numbers(shown["value"], torch.float32), mean.float())
        trace = numbers(shown["trace"], torch.uint8).view(len(WORDS), -1).float() / 255 * shown["trace_scale"]
        assert torch.equal(trace == 0, gate.trace == 0)
        torch.testing.assert_close(trace, gate.trace, rtol=0, atol=shown["trace_scale"] / 255)
        assert shown["density"] == gate.measured_density
        assert shown["overlap"] == gate.overlap().inputs


def test_only_never_is_none_and_only_always_is_all(tmp_path):
    layer = layer_that_opens([[0, 1], [0], [0], [0]])
    with torch.no_grad(), bg.record_gates(layer, trace=4) as record:
        layer(inputs(layer, [0, *[1] * 99_999]))
    (shown,) = read_page(record.to_html(tmp_path / "a.html"))["gates"]
    assert numbers(shown["frequency"], torch.uint16).tolist() == [65535, 1, 0, 0]
    assert shown["shares"] == pytest.approx([0.25, 0.0, 0.25, 0.5])


def test_a_small_gate_is_not_drawn_closed(tmp_path):
    layer = layer_that_opens([[0, 1]])
    with torch.no_grad():
        layer.gate.weight[1, 0] = 1 + 1e-6
        with bg.record_gates(layer, trace=1) as record:
            layer(inputs(layer, [0]))
    (shown,) = read_page(record.to_html(tmp_path / "a.html"))["gates"]
    assert numbers(shown["trace"], torch.uint8).tolist() == [255, 1, 0, 0]


def test_classes_are_counted_and_compared(record, tmp_path):
    page = read_page(record.to_html(tmp_path / "atlas.html", class_names=["a", "b", "c"]))
    assert page["classes"] == ["a", "b", "c"]
    for shown in page["gates"]:
        gate, own = record.gates[shown["name"]], shown["classes"]
        assert own["numbers"] == [0, 1, 2]
        often = numbers(own["frequency"], torch.uint8).view(3, -1)
        for label in range(3):
            torch.testing.assert_close(
                often[label] / 255, gate.frequency(label).flatten().float(), rtol=0, atol=1 / 255
            )
        want = gate.class_overlap()
        got = torch.tensor([[float("nan") if v is None else v for v in row] for row in own["overlap"]])
        torch.testing.assert_close(got, want.float(), equal_nan=True)


def test_of_many_classes_the_most_frequent_are_shown(monkeypatch, tmp_path):
    monkeypatch.setattr(atlas, "MOST_CLASSES", 2)
    layer = layer_that_opens([[0], [1]])
    with torch.no_grad(), bg.record_gates(layer) as record, record.labelled([5, 5, 2, 7, 7]):
        layer(inputs(layer, [0, 0, 1, 1, 1]))
    page = read_page(record.to_html(tmp_path / "a.html"))
    assert page["classes"] == ["5", "7"]
    assert page["classes_left_out"] == 1
    assert len(page["gates"][0]["classes"]["overlap"]) == 2


def test_shares_over_training_add_up(record, tmp_path):
    page = read_page(record.to_html(tmp_path / "atlas.html", history=HISTORY))
    assert page["history"] == [[1.0, 0.5, 0.5, 0.0, 0.0], [2.0, 0.25, 0.5, 0.125, 0.125]]
    for gate in page["gates"]:
        assert sum(gate["shares"]) == pytest.approx(1)


def test_gates_that_saw_other_rows_come_without_tokens(tmp_path):
    torch.manual_seed(0)
    body, head = bg.DynamicSparseLinear(8, 8, block_size=4), bg.DynamicSparseLinear(8, 4, block_size=4)
    with torch.no_grad(), bg.record_gates(nn.ModuleDict({"body": body, "head": head}), trace=5) as record:
        head(body(torch.randn(5, 8)).mean(0, keepdim=True))
    page = read_page(record.to_html(tmp_path / "a.html", tokens=list("abcde")))
    assert [gate["trace"] is None for gate in page["gates"]] == [False, True]


@pytest.mark.parametrize("packed", [False, True])
def test_converted_models_packed_or_not(packed, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    bg.sparsify_(model, block_size=(16, 8), filter_fn=lambda *_: True)
    model = bg.pack(model, "int8") if packed else model
    with torch.no_grad(), bg.record_gates(model, trace=6) as record:
        model(torch.randn(6, 32))
    page = read_page(record.to_html(tmp_path / "a.html", gates=["2"]))
    assert [gate["name"] for gate in page["gates"]] == ["2"]
    assert (
        numbers(page["gates"][0]["trace"], torch.uint8).view(6, -1).count_nonzero()
        == record.gates["2"].open_counts.sum()
    )


def test_a_transformer_token_by_token(tmp_path):
    torch.manual_seed(0)
    model = gpt2().eval()
    bg.sparsify_(model, block_size=16)
    words = tokens()[:1]
    with torch.no_grad(), bg.record_gates(model, trace=words.numel()) as record:
        model(input_ids=words)
    names = [f"token {number}" for number in words.flatten().tolist()]
    page = read_page(record.to_html(tmp_path / "a.html", tokens=names))
    assert page["tokens"] == names
    assert len(page["gates"]) == 8
    assert all(gate["trace"] and gate["rows"] == len(names) for gate in page["gates"])


def test_a_record_that_saw_nothing_is_refused(tmp_path):
    with raises_blockgate("Run the model inside the record"):
        bg.record_gates(small_net()).to_html(tmp_path / "a.html")


def test_the_page_needs_nothing_else(record, tmp_path):
    page = record.to_html(tmp_path / "atlas.html", tokens=WORDS).read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|@import|url\(|fetch\(|XMLHttpRequest|\bimport\b""", page)
    # Nothing is left of the template's marks.
    assert not re.findall(r"\$(title|style|data|script|version)\b", page)
    again = record.to_html(str(tmp_path / "again.htm"), tokens=WORDS).read_text()
    assert again == page


def test_names_are_only_text(tmp_path):
    evil = '</script><script>alert("1")</script><!--'
    model = nn.ModuleDict({evil.replace(".", ""): layer_that_opens([[0]])})
    layer = next(iter(model.values()))
    with torch.no_grad(), bg.record_gates(model, trace=1) as record:
        layer(inputs(layer, [0]))
    file = record.to_html(tmp_path / "a.html", tokens=[evil], title=evil)
    assert "<script>alert" not in file.read_text()
    page = read_page(file)
    assert page["tokens"] == [evil]
    assert page["gates"][0]["name"] == evil


def test_values_that_are_not_finite_are_shown(tmp_path):
    layer = layer_that_opens([[0, 1]])
    with torch.no_grad():
        layer.gate.weight[0, 0] = float("inf")
        with bg.record_gates(layer, trace=1) as record:
            layer(inputs(layer, [0]))
    (shown,) = read_page(record.to_html(tmp_path / "a.html"))["gates"]
    assert numbers(shown["value"], torch.float32).isfinite().all()
    assert numbers(shown["trace"], torch.uint8)[0] == 255


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["one"]}, "tokens: expected a list of 10, one for each row that was kept, got 1."),
        ({"tokens": "ten chars!"}, "tokens: expected a list of 10"),
        ({"class_names": ["a"]}, "class_names: expected one for each label, got 'none for [1, 2]'"),
        ({"gates": ["nonsense"]}, "gates: expected names among ['ih_l0'"),
        ({"history": [{"epoch": 1}]}, "history: expected rows with numbers epoch, always_open"),
        ({"history": [{**HISTORY[0], "always_open": 50}]}, "shares from 0 to 1"),
        ({"history": [3]}, "history: expected rows with numbers"),
    ],
)
def test_what_does_not_fit_is_refused(record, tmp_path, options, message):
    with raises_blockgate(message):
        record.to_html(tmp_path / "atlas.html", **options)
    assert not list(tmp_path.iterdir())


def test_pages_a_browser_can_not_hold_are_refused(record, tmp_path, monkeypatch):
    monkeypatch.setattr(atlas, "MOST_TRACE", 1000)
    with raises_blockgate("blocks times tokens"):
        record.to_html(tmp_path / "atlas.html")
    record.to_html(tmp_path / "atlas.html", gates=["ih_l0"])


def test_other_names_and_places_are_refused(record, tmp_path):
    with raises_blockgate("a name that ends in .html"):
        record.to_html(tmp_path / "atlas.png")
    (tmp_path / "file").write_text("")
    with raises_blockgate("Choose another path"):
        record.to_html(tmp_path / "file" / "atlas.html")


def test_its_parts_come_with_the_package():
    folder = resources.files("blockgate.inspect.atlas")
    assert all((folder / name).is_file() for name in ("page.html", "style.css", *atlas.SCRIPTS))


def test_it_needs_torch_only(tmp_path):
    code = f"""
import sys
for extra in ("matplotlib", "rich", "tyro", "numpy"):
    sys.modules[extra] = None
import torch, blockgate as bg
layer = bg.DynamicSparseLinear(8, 8, block_size=4)
with bg.record_gates(layer, trace=2) as record:
    layer(torch.randn(2, 8))
record.to_html({str(tmp_path / "a.html")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_page(tmp_path / "a.html")["gates"][0]["name"] == "gate"


def test_a_run_that_fails_leaves_its_record(tmp_path):
    layer = layer_that_opens([[0]])
    with pytest.raises(ZeroDivisionError), bg.record_gates(layer, trace=1) as record:
        run_and_fail(layer, [0])
    assert len(read_page(record.to_html(tmp_path / "a.html"))["tokens"]) == 1


def test_two_layers_by_name(tmp_path):
    model = small_net()
    with torch.no_grad(), bg.record_gates(model, trace=3) as record:
        model(torch.randn(3, 6))
    assert [gate["name"] for gate in read_page(record.to_html(tmp_path / "a.html"))["gates"]] == ["2", "4"]
