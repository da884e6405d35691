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


def test_every_script_has_a_test():
    tested = Path(__file__).read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert all(f'"{name}"' in tested for name in scripts)
