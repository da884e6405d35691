"""Every example runs, at a small size, and prints what it promises."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *flags: object) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sparsify_your_model(tmp_path):
    picture = tmp_path / "gates.png"
    printed = run("sparsify_your_model.py", "--steps", 30, "--width", 256, "--picture", picture)
    assert "2 layers gated, 1 skipped" in printed
    assert "faster" in printed
    assert picture.stat().st_size > 1000


def test_serve_lstm():
    printed = run("serve_lstm.py", "--words", 200, "--width", 128, "--tokens", 5)
    assert printed.count("tokens/s") == 5
    assert printed.count("x of dense packed") == 3


def test_serve_many_measures_and_survives_a_kill(tmp_path):
    small = ("--words", 200, "--width", 128, "--count", 10, "--processes", 2, "--seconds", 0.5)
    file = tmp_path / "measured.md"
    printed = run("serve_many.py", "--measure", *small, "--clients", 2, "--output", file)
    assert len(printed.splitlines()) == 4
    cells = [line.split(" | ")[3] for line in file.read_text().splitlines() if line.startswith("| ")]
    assert cells == ["words/s", *(line.split()[3] for line in printed.splitlines()[2:])]
    assert " 0 of other processes" in run("serve_many.py", "--kill", *small, "--clients", 4)


def test_serve_many_refuses_what_it_cannot_answer():
    command = [sys.executable, str(EXAMPLES / "serve_many.py"), "--words=200", "--width=128", "--processes=1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*command, f"--port={port}", "--limit=3"]) as server:
        try:
            url = f"http://127.0.0.1:{port}/words"
            assert read(f"{url}?first=3&count=4") == (200, 5)
            assert read(f"{url}?first=200") == (400, 1)
            # A client that reads nothing takes one of the places, and costs no more.
            with urllib.request.urlopen(f"{url}?count=1000"), urllib.request.urlopen(f"{url}?count=1000"):
                assert read(f"{url}?count=4")[0] == 503
            # An answer that has begun is finished before the server stops.
            with urllib.request.urlopen(f"{url}?count=1000") as answer:
                server.send_signal(signal.SIGTERM)
                assert len(answer.read().splitlines()) == 1001
        finally:
            server.terminate()


def read(url: str) -> tuple[int, int]:
    """Status and lines of an answer, from a server that may still be starting."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(url) as answer:
                return answer.status, len(answer.read().splitlines())
        except urllib.error.HTTPError as error:
            return error.code, len(error.read().splitlines())
        except OSError:
            time.sleep(0.1)
    raise AssertionError("no server")


def test_convert_transformer():
    printed = run("convert_transformer.py", "--steps", 2, "--size", 128)
    assert "4 layers gated, 3 skipped" in printed
    assert printed.count(" ms for 32 words") == 3


def test_train_many_goes_on_in_another_number_of_processes(tmp_path):
    def train(processes, steps):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        script = [EXAMPLES / "train_many.py", "--width=128", f"--steps={steps}", f"--folder={tmp_path}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *script], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "steps 0 to 40 in 2 processes" in train(2, 40)
    assert "steps 40 to 60 in 1 processes" in train(1, 60)


def test_custom_training_loop_resumes_bit_by_bit(tmp_path):
    def train(*flags):
        return run("custom_training_loop.py", "--steps", 100, "--size", 128, "--checkpoint", *flags).splitlines()

    whole = train(tmp_path / "whole.pt")
    begun = train(tmp_path / "parts.pt", "--stop-after", 50)
    resumed = train(tmp_path / "parts.pt")
    assert resumed[0] == "goes on after step 50, at sparsity 0.90"
    assert begun[-1] not in resumed
    # What comes after the break is what comes without one; the last line names the file.
    after = next(number for number, line in enumerate(whole) if line.startswith("step 100"))
    assert resumed[1:-1] == whole[after:-1]


def test_every_script_has_a_test():
    tested = Path(__file__).read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert all(f'"{name}"' in tested for name in scripts)


def test_decode_without_training():
    printed = run("decode_without_training.py", "--length", 16)
    assert "multiply-adds saved, gates counted" in printed
    assert printed.count(" ms a token") == 2


def test_finetune_classifier(tmp_path):
    figures, arms = tmp_path / "figures.json", ["dense", "gated", "slim", "dense, longer"]
    options = ["--rounds", 3, "--distil", "--folder", tmp_path, "--arms", *arms, "--output", figures]
    printed = run("finetune_classifier.py", "--steps", 30, *options)
    assert "2 MLPs paired" in printed
    assert printed.count(" ms a text") == 4
    found = json.loads(figures.read_text())["arms"]
    assert {found[arm]["steps"] for arm in arms} == {30}
    assert all(0 <= found[arm]["accuracy"] <= 1 for arm in arms)
    # A stopped run goes on: here one arm ended after 25 steps, and the others are done.
    state = torch.load(tmp_path / "gated.pt")
    torch.save(state | {"done": 25}, tmp_path / "gated.pt")
    printed = run("finetune_classifier.py", "--steps", 30, *options)
    assert printed.count("  step ") == 1
    again = json.loads(figures.read_text())["arms"]
    for arm in ("dense", "slim"):
        assert again[arm]["accuracy"] == found[arm]["accuracy"]
