"""Every example runs, at a small size, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_convert_transformer():
    printed = run("convert_transformer.py", "--steps", 2, "--size", 128)
    assert "4 layers gated, 3 skipped" in printed
    assert printed.count(" ms for 32 words") == 3


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
