"""What the command line says of itself: an overview of the commands, and one line where its words are wrong."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

__all__ = ["in_one_line", "overview", "program"]

# A flag with its type, such as "--epochs INT".
FLAG = r"(?<!\S)--(?!help)[a-z][\w.-]*(?= (?:INT|FLOAT|STR|PATH|\{|\[))"

# Suggestions that one line has room for.
MOST_SUGGESTIONS = 3


def program() -> str:
    """This program as a shell in this folder can call it, whether or not its environment is active."""
    beside = Path(sys.executable).with_name("blockgate")
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m blockgate"
    if shutil.which("blockgate") == str(beside):
        return "blockgate"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def overview(description: str, commands: dict[str, Any]) -> str:
    """The help of the whole program: each command with the first sentence of its own help."""
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {_first_line(command)}" for name, command in sorted(commands.items())]
    return "\n".join(["usage: blockgate [--help] [--version] COMMAND ...", "", description, "", "commands:", *lines])


def _first_line(command: Any) -> str:
    return str(command.__doc__).strip().splitlines()[0]


def in_one_line(box: str, page: str) -> str:
    """An error of tyro's, which draws a box of many lines, as one: what is wrong, what was meant, where to read on.

    Args:
        box: what tyro printed: a title, then sections with lines between them, the last of which names a help page.
        page: the command whose help says more.
    """
    # Where the terminal has no characters for a box, there are dashes, and the title stands above the first of them.
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    sections = re.split(r"\n[─-]{4,}\n", "\n".join(lines).strip("-\n"))
    said = [" ".join(section.split()) for section in sections if section.strip()]
    said = said if "╭" in box else said[1:]
    if len(said) < 2:  # not the box that we know
        return " ".join(box.split())
    line = said[0]
    for text in said[1:-1]:
        if text.startswith("Available subcommands"):
            line += f". {text}"
    similar = [text for text in said[1:-1] if not text.startswith(("Available subcommands", "Argument helptext"))]
    meant = list(dict.fromkeys(re.findall(FLAG, " ".join(similar))))
    if meant:
        line += f". Perhaps you meant {' or '.join(meant[:MOST_SUGGESTIONS])}"
    return f"{line.rstrip('.:')}. See: {page} --help"
