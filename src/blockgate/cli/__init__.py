"""The `blockgate` command: one dataclass per subcommand, whose fields are its flags and whose `run` does the work."""

from __future__ import annotations

import sys
from typing import Any

from blockgate._version import __version__
from blockgate.errors import BlockgateError

__all__ = ["main"]

DESCRIPTION = "Block-wise dynamic sparseness for PyTorch. `blockgate COMMAND --help` explains a command."


def main(args: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 on success, 2 for a mistake of the user's, told in one line."""
    args = sys.argv[1:] if args is None else args
    if args == ["--version"]:
        print(f"blockgate {__version__}")
        return 0
    try:
        import tyro

        commands = _commands()
    except ImportError as error:
        print(f"blockgate: the command line needs {error.name}. Run: pip install 'blockgate[train]'", file=sys.stderr)
        return 2
    command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="blockgate", description=DESCRIPTION, args=args or ["--help"]
    )
    try:
        command.run()
    except BlockgateError as error:
        print(f"blockgate: {error}", file=sys.stderr)
        return 2
    return 0


def _commands() -> dict[str, Any]:
    """Name to dataclass; imported here so that `--version` and `--help` start fast."""
    from blockgate.cli.bench import Bench
    from blockgate.cli.info import Info

    return {"bench": Bench, "info": Info}
