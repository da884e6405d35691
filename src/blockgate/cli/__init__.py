"""The `blockgate` command: one dataclass per subcommand, whose fields are its flags and whose `run` does the work."""

from __future__ import annotations

import sys
from typing import Any

from blockgate._version import __version__
from blockgate.errors import BlockgateError

__all__ = ["main"]

# What shells make of a program that Ctrl-C ended.
INTERRUPTED = 130

DESCRIPTION = "Block-wise dynamic sparseness for PyTorch. `blockgate COMMAND --help` explains a command."


def main(args: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 on success, 2 for a mistake of the user's, 130 after Ctrl-C."""
    args = sys.argv[1:] if args is None else args
    if args == ["--version"]:
        print(f"blockgate {__version__}")
        return 0
    try:
        import tyro

        commands = _commands(args)
    except ImportError as error:
        print(f"blockgate: the command line needs {error.name}. Run: pip install 'blockgate[train]'", file=sys.stderr)
        return 2
    except BlockgateError as error:
        return _complain(error)
    command = tyro.extras.subcommand_cli_from_dict(
        commands, prog="blockgate", description=DESCRIPTION, args=args or ["--help"]
    )
    try:
        command.run()
    except BlockgateError as error:
        return _complain(error)
    except KeyboardInterrupt as stop:
        # Some commands say what they have kept.
        print(": ".join(["blockgate: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return INTERRUPTED
    return 0


def _complain(error: BlockgateError) -> int:
    print(f"blockgate: {error}", file=sys.stderr)
    return 2


def _commands(args: list[str]) -> dict[str, Any]:
    """Name to dataclass; imported here so that `--version` and `--help` start fast."""
    from blockgate.cli.bench import Bench
    from blockgate.cli.data import Data
    from blockgate.cli.demo import Demo
    from blockgate.cli.evaluate import Evaluate
    from blockgate.cli.generate import Generate
    from blockgate.cli.info import Info
    from blockgate.cli.reproduce import Reproduce
    from blockgate.cli.train import train_command

    return {
        "bench": Bench,
        "data": Data,
        "demo": Demo,
        "evaluate": Evaluate,
        "generate": Generate,
        "info": Info,
        "reproduce": Reproduce,
        "train": train_command(args),
    }
