"""The script that trains gates into a sentence encoder runs, on a tiny encoder and a made-up text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import blockgate as bg
from tests.corpora import WORDS, write_texts

transformers = pytest.importorskip("transformers", reason="the encoder is a model of transformers")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = ("--updates", "8", "--batch", "4", "--sparsities", "0.5", "--blocks", "16x16")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import sentence_encoder

    yield sentence_encoder
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()


@pytest.fixture
def folders(tmp_path):
    """Flags that name a saved encoder of two layers and a text."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=WORDS + 5, max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder", safe_serialization=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(WORDS))]
    (tmp_path / "encoder" / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizer(str(tmp_path / "encoder" / "vocab.txt")).save_pretrained(tmp_path / "encoder")
    write_texts(tmp_path / "text")
    return ("--model", str(tmp_path / "encoder"), "--corpus", str(tmp_path / "text"))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_arms_run_once_and_end_in_a_table(script, folders, tmp_path, capsys):
    flags = [*SMALL, *folders, "--output", str(tmp_path / "results")]
    script.main([*flags, "--kinds", "topk", "margin", "static", "--gate-lr", "0.3"])
    table = capsys.readouterr().out
    names = ["margin-16x16-50-gate-lr-0.3", "static-16x16-50", "topk-16x16-50-gate-lr-0.3"]
    files = sorted((tmp_path / "results").glob("*.json"))
    assert [file.name for file in files] == [f"{name}_seed-1.json" for name in names]
    for name, file in zip(names, files, strict=True):
        result = json.loads(file.read_text())
        assert f"| {name} | 1 |" in table
        assert result["blocks"]["density"] == pytest.approx(0.5, abs=0.05)
        assert 0 < result["metrics"]["test"]["cosine"] <= 1.0001
        assert result["metrics"]["test"]["sentences"] == 30
        assert result["curve"][-1]["sparsity"] == 0.5
        assert {"cpu", "commit", "torch", "transformers"} <= result["machine"].keys()
        # Where it ran is nobody's business.
        assert str(tmp_path) not in file.read_text()
    script.main([*flags, "--kinds", "static", "--list"])
    assert capsys.readouterr().out == "done: static-16x16-50, seed 1\n"
    with pytest.raises(SystemExit, match=r"another config .*'updates': \(8, 9\)"):
        script.main([*flags, "--kinds", "static", "--updates", "9"])


def test_revived_blocks(script, folders, tmp_path, capsys):
    script.main([*SMALL, *folders, "--output", str(tmp_path / "results"), "--kinds", "topk", "--revive", "0.3"])
    assert "| topk-16x16-50-revive-0.3 | 1 | 50.0% |" in capsys.readouterr().out


def test_all_arms_start_from_the_teacher_with_the_same_batches_and_ramp(script, folders):
    teacher, tokenizer = script.load_encoder(folders[1])
    arms = [
        script.Arm(kind=kind, block=(32, 8), sparsity=0.75, updates=20, batch=4, corpus=folders[3], model=folders[1])
        for kind in script.KINDS
    ]
    batches = [script.training_batches(arm, tokenizer, seed=3) for arm in arms]
    (ids, mask), *_ = batches[0]
    assert len(batches[0]) == 20
    assert ids.shape == mask.shape == (4, 12)
    students, ramps = zip(*(script.make_student(teacher, arm) for arm in arms), strict=True)
    expected = script.encode(teacher, ids, mask)
    for student, ramp, own in zip(students, ramps, batches, strict=True):
        assert all(torch.equal(a, b) for pair in zip(own, batches[0], strict=True) for a, b in zip(*pair, strict=True))
        for found, wanted in zip(script.encode(student, ids, mask), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=0.1, rtol=0)
        assert [ramp.sparsity_at(step) for step in range(21)] == [ramps[0].sparsity_at(step) for step in range(21)]
        assert not any(p.requires_grad for p in student.embeddings.parameters())
        assert not any(p.requires_grad for p in teacher.parameters())
    gated = [m for m in students[0].modules() if isinstance(m, bg.DynamicSparseLinear)]
    assert len(gated) == len(ramps[2].weights) == 12


def test_embeddings_ignore_padding(script, folders):
    teacher, tokenizer = script.load_encoder(folders[1])
    rows = [[2, 7, 8, 3], [2, 9, 3]]
    together, hidden = script.encode(teacher, *script.padded(rows, tokenizer.pad_token_id))
    alone = torch.cat([script.encode(teacher, *script.padded([row], 0))[0] for row in rows])
    torch.testing.assert_close(together, alone)
    assert hidden.shape == (7, 64)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(2))


def test_sentences_are_cut_from_paragraphs_without_headings(script, tmp_path):
    class Words:
        unk_token = "[UNK]"

        def __call__(self, sentences, **_):
            return {"input_ids": sentences}

    paragraph = "One two <unk> four five . Well @-@ known things of 1 @,@ 000 ? Short one ."
    (tmp_path / "valid.txt").write_text(f" = A heading of five words = \n \n {paragraph} \n")
    expected = ["One two [UNK] four five .", "Well-known things of 1,000 ?"]
    assert script.read_sentences(str(tmp_path), "valid", Words()) == expected
