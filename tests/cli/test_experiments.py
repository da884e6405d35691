"""The commands train, evaluate and generate, as a user types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from blockgate.cli import main
from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import run_to_plain
from tests.corpora import tiny_image_run, tiny_text_run, write_images


def test_flags_override_the_config(trained):
    run = json.loads((trained / "run" / "run.json").read_text())
    assert (run["run"]["epochs"], run["run"]["model"]["gate"]["sparsity"]) == (1, 0.75)
    assert {"torch", "cpu", "commit", "command"} <= run["notes"].keys()


def test_evaluate_as_text_and_json(trained, capsys):
    results = json.loads((trained / "run" / "results.json").read_text())
    assert main(["evaluate", str(trained / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["perplexity"] == pytest.approx(results["test"]["perplexity"], rel=1e-6)
    assert 0 < facts["density"] <= 0.25 + 1e-9
    assert main(["evaluate", str(trained / "run" / "last.pt"), "--part", "valid", "--sparsity", "0"]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "density" in out


def test_evaluate_tells_of_words_that_the_model_does_not_know(trained, tmp_path, capsys):
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.txt").write_text("w1 quite another language\n" * 60)
    assert main(["evaluate", str(trained / "run"), "--data", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["missing_words"] == pytest.approx(3 / 5)
    assert "warning: the model's vocabulary lacks 60% of the words" in err


def test_generate_is_decided_by_the_seed(trained, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(trained / "run"), "--words", "20", "--seed", seed, "--prompt", "w1 w8"]) == 0
        out, err = capsys.readouterr()
        assert "20 words" in err
        assert "words/s" in err
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0].split()) == 20


@pytest.mark.parametrize("packed", ["no", "bf16", "int8"])
def test_generate_with_other_weights(trained, packed, capsys):
    assert main(["generate", str(trained / "run"), "--words", "5", "--packed", packed, "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.split()) == 5


def test_generate_finds_the_likeliest_words_by_screening(trained, tmp_path, capsys):
    run = str(tmp_path / "run")
    config = str(trained / "tiny.json")
    # An output layer that scores every word; that of the shared run is adaptive.
    assert main(["train", config, "--output", run, "--epochs", "1", "--model.cutoffs"]) == 0
    capsys.readouterr()
    command = ["generate", run, "--words", "9", "--temperature", "0", "--json"]
    told = []
    for layer in ("auto", "screened", "dense"):
        assert main([*command, "--output-layer", layer]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [facts["output_layer"] for facts in told] == ["screened", "screened", "dense"]
    assert told[0]["words"] == told[1]["words"] == told[2]["words"]
    assert main(["generate", run, "--words", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output_layer"] == "dense"
    assert main([*command, "--output-layer", "screened", "--packed", "no"]) == 2
    assert "--output-layer screened: expected a packed model" in capsys.readouterr().err
    assert main(["generate", str(trained / "run"), "--temperature", "0", "--output-layer", "screened"]) == 2
    assert "got 'an adaptive softmax'" in capsys.readouterr().err


def test_only_language_models_generate(tmp_path, capsys):
    run = tiny_image_run(write_images(tmp_path / "images"), tmp_path / "run", epochs=1)
    (tmp_path / "tiny.json").write_text(json.dumps(run_to_plain(run)))
    assert main(["train", str(tmp_path / "tiny.json")]) == 0
    capsys.readouterr()
    assert main(["generate", str(run.output)]) == 2
    assert "a language model" in capsys.readouterr().err
    assert main(["evaluate", str(run.output), "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["error"] <= 1


@pytest.mark.parametrize("command", ["bench", "data", "evaluate", "generate", "reproduce", "train"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"    blockgate {command} " in capsys.readouterr().out


def test_train_as_json(trained, tmp_path, capsys):
    command = ["train", str(trained / "tiny.json"), "--epochs", "1", "--output", str(tmp_path / "run"), "--json"]
    assert main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("output") == str(tmp_path / "run")
    assert printed == json.loads((tmp_path / "run" / "results.json").read_text())


def test_generate_as_json_writes_the_same_words(trained, capsys):
    command = ["generate", str(trained / "run"), "--words", "7", "--prompt", "w1", "--seed", "3"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["words"] == text.split()
    assert facts["words_per_second"] > 0
    assert (facts["prompt"], facts["seed"], err) == ("w1", 3, "")


def test_words_are_shown_as_they_are_written(trained):
    command = [sys.executable, "-m", "blockgate", "generate", str(trained / "run"), "--words", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert len(process.stdout.read(100)) == 100
        process.send_signal(signal.SIGINT)
        error = process.communicate()[1]
    assert process.returncode == 130, error
    assert error == "blockgate: interrupted\n"


def test_ctrl_c_keeps_a_checkpoint_and_ends_with_130(trained):
    run = tiny_text_run(trained / "texts", trained / "stopped", epochs=1000)
    config = trained / "long.json"
    config.write_text(json.dumps(run_to_plain(replace(run, checkpoint_seconds=1e9))))
    command = [sys.executable, "-m", "blockgate", "train", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (run.output / "epochs.csv").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        error = process.communicate()[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert load_checkpoint(run.output / "last.pt")["training"]["updates"] > 0


@pytest.mark.parametrize("module", ["lightning.fabric", "tensorboard"])
def test_training_without_the_extra_says_what_to_install(module, trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["train", str(trained / "tiny.json"), "--output", str(trained / "other")]) == 2
    assert "pip install 'blockgate[train]'" in capsys.readouterr().err
