"""Whatever a user gets wrong ends with code 2 and one line that names it; never with a traceback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from blockgate.cli import main


@pytest.fixture(scope="module")
def wrong(trained, tmp_path_factory):
    """A folder of things that are not what they should be, beside the run."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty").mkdir()
    (folder / "file").write_text("text")
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "typo.json").write_text('{"task": "language-model", "epoch": 3}')
    (folder / "type.json").write_text('{"task": "language-model", "epochs": "3"}')
    (folder / "bytes.json").write_bytes(b"\xff\xfe\x00")
    best = (trained / "run" / "best.pt").read_bytes()
    for name, size in {"none": 0, "little": 100, "half": len(best) // 2, "nearly": len(best) - 1}.items():
        (folder / f"{name}.pt").write_bytes(best[:size])
    state = torch.load(trained / "run" / "best.pt", weights_only=True)
    for name, other in {
        "foreign": {"a": torch.ones(3)},
        "list": [1, 2],
        "module": torch.nn.Linear(2, 2),
        "future": state | {"format": 99},
        "option": state | {"run": state["run"] | {"tomorrow": 1}},
        "task": state | {"run": {"task": "images"}},
        "words": state | {"vocabulary": 3},
        "weights": state | {"model": 3},
        "sizes": state | {"model": {"x": torch.ones(1)}},
    }.items():
        torch.save(other, folder / f"{name}.pt")
    for name, text in {"latin": b"\xe9t\xe9\n", "short": b"a b\n"}.items():
        (folder / name).mkdir()
        for part in ("train", "valid", "test"):
            (folder / name / f"{part}.txt").write_bytes(text)
    return folder


def complaint(args, capsys) -> str:
    """The one line that a wrong command line gets."""
    try:
        code = main(args)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("blockgate: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        # Words that no command knows.
        (["nonsense"], "expected one of advise, atlas, bench, data"),
        (["info", "--nonsense"], "--nonsense. See: blockgate info --help"),
        (["train", "ptb-lstm-laptopp"], "ptb-lstm-paper"),
        (["train", "ptb-lstm-laptop", "--epoch", "3"], "Perhaps you meant --epochs. See: blockgate train --help"),
        (["train", "ptb-lstm-laptop", "--epochs", "three"], "--epochs"),
        (["train", "ptb-lstm-laptop", "--epochs"], "--epochs"),
        (["train"], "mnist-laptop"),
        (["evaluate"], "Missing from blockgate evaluate: PATH"),
        (["generate", "RUN", "--packed", "int4"], "'bf16'"),
        (["data", "check", "imagenet"], "wikitext-2"),
        (["data", "fetch"], "blockgate data fetch ptb"),
        (["reproduce", "table9"], "table2"),
        (["reproduce", "table2", "--arms", "nothing"], "ptb-lstm-dense"),
        # Files that are not there, or not what they should be.
        (["evaluate", "nowhere"], "nowhere"),
        (["generate", "nowhere"], "nowhere"),
        (["evaluate", "WRONG/empty"], "best.pt, which isn't there"),
        (["evaluate", "RUN/../tiny.json"], "a file that blockgate train wrote"),
        (["evaluate", "RUN", "--data", "nowhere"], "nowhere"),
        (["evaluate", "RUN", "--data", "mnist"], "a data set of text"),
        (["evaluate", "RUN", "--data", "WRONG/latin"], "UTF-8"),
        (["evaluate", "RUN", "--data", "WRONG/file"], "train.txt"),
        (["train", "nowhere.json"], "nowhere.json"),
        (["train", "WRONG/broken.json"], "a JSON file"),
        (["train", "WRONG/bytes.json"], "a JSON file"),
        (["train", "WRONG/list.json"], "a JSON object"),
        (["train", "WRONG/typo.json"], "['epoch']"),
        (["train", "WRONG/type.json"], "got '3'"),
        (["train", "WRONG"], "WRONG"),
        (["train", "ptb-lstm-laptop", "--data-dir", "nowhere", "--output", "WRONG/new"], "blockgate data fetch ptb"),
        (["data", "check", "ptb", "--data-dir", "WRONG/empty"], "blockgate data fetch ptb"),
        (["reproduce", "table2", "--data-dir", "WRONG/empty", "--output", "WRONG/new"], "blockgate data fetch ptb"),
        # Folders that can't be written.
        (["train", "RUN/../tiny.json", "--output", "WRONG/file/run"], "WRONG/file"),
        (["reproduce", "table2", "--scale", "tiny", "--output", "WRONG/file/run"], "WRONG/file"),
        # Numbers that mean nothing.
        (["evaluate", "RUN", "--sparsity", "1"], "sparsity"),
        (["evaluate", "RUN", "--sparsity", "-0.5"], "sparsity"),
        (["evaluate", "RUN", "--batch-size", "-1"], "--batch-size"),
        (["evaluate", "RUN", "--batch-size", "0"], "--batch-size"),
        (["evaluate", "RUN", "--threads", "0"], "threads"),
        (["evaluate", "RUN", "--threads", "1000000"], "threads"),
        (["generate", "RUN", "--prompt", "zebra"], "zebra"),
        (["generate", "RUN", "--threads", "-3"], "threads"),
        (["generate", "RUN", "--words", "-1"], "words"),
        (["generate", "RUN", "--temperature", "nan"], "temperature"),
        (["generate", "RUN", "--seed", "-1"], "seed"),
        (["generate", "RUN", "--top-k", "0"], "top_k"),
        (["reproduce", "table2", "--jobs", "0"], "jobs"),
        (["reproduce", "figure1", "--time"], "a table"),
        (["bench", "linear", "--shapes", "12"], "OUTxIN"),
        (["bench", "linear", "--sparsities", "1"], "sparsities"),
        (["bench", "lstm", "--only", "nothing"], "--only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_line(trained, wrong, args, message, capsys):
    def real(text):
        return text.replace("RUN", str(trained / "run")).replace("WRONG", str(wrong))

    assert real(message) in complaint([real(arg) for arg in args], capsys)


@pytest.mark.parametrize(
    "flags",
    [
        "--epochs 0",
        "--bptt 0",
        "--seed -1",
        "--threads 0",
        "--batch-size 100000",
        "--checkpoint-seconds nan",
        "--accelerator abacus",
        "--precision 3-bit",
        "--optimizer.lr -1",
        "--optimizer.momentum -1",
        "--optimizer.weight-decay -1",
        "--optimizer.clip -1",
        "--schedule.warmup -1",
        "--ramp.begin 5 --ramp.end 2",
        "--pruning.sparsity 0.5",
        "--model.hidden-size 0",
        "--model.dropout 2",
        "--model.gate.sparsity 1",
        "--model.gate.key-size 1000",
        "--data WRONG/short",
    ],
)
def test_a_run_that_makes_no_sense_is_refused_at_once(trained, wrong, tmp_path, flags, capsys):
    flags = flags.replace("WRONG", str(wrong)).split()
    complaint(["train", str(trained / "tiny.json"), "--output", str(tmp_path / "run"), *flags], capsys)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("command", ["evaluate", "generate"])
@pytest.mark.parametrize(
    "name",
    ["none", "little", "half", "nearly", "foreign", "list", "module", "future", "option", "task", "words", "weights",
     "sizes"],
)  # fmt: skip
def test_a_harmed_or_foreign_checkpoint_is_named(wrong, command, name, capsys):
    message = complaint([command, str(wrong / f"{name}.pt")], capsys)
    assert name in message or "config" in message


def test_resuming_needs_more_than_weights(trained, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    for source, target in {"run.json": "run.json", "best.pt": "last.pt"}.items():
        (folder / target).write_bytes((trained / "run" / source).read_bytes())
    run = json.loads((folder / "run.json").read_text())["run"]
    (tmp_path / "again.json").write_text(json.dumps(run | {"output": str(folder)}))
    assert "only weights" in complaint(["train", str(tmp_path / "again.json"), "--resume"], capsys)


def test_a_run_is_not_overwritten(trained, capsys):
    assert "--resume" in complaint(["train", str(trained / "tiny.json")], capsys)


@pytest.mark.parametrize("args", ["--help", "train ptb-lstm-laptop --help", "reproduce table2 --list"])
def test_a_reader_that_goes_is_no_reason_to_complain(args):
    """As in `blockgate ... | head -1`."""
    command = [sys.executable, "-m", "blockgate", *args.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert error == ""
    assert process.returncode != 0
