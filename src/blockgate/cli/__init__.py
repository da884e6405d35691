"""The `blockgate` command: one dataclass per subcommand, whose fields are its flags and whose `run` does the work."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from blockgate._version import __version__
from blockgate.cli.usage import in_one_line, overview
from blockgate.errors import BlockgateError, invalid, missing_extra

__all__ = ["main", "parse"]

# What shells make of a program that Ctrl-C ended, and of one whose reader has gone.
INTERRUPTED, READER_GONE = 130, 141

DESCRIPTION = "Block-wise dynamic sparseness for PyTorch. `blockgate COMMAND --help` explains a command."


def main(args: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 on success, 2 for a mistake of the user's, 130 after Ctrl-C."""
    args = sys.argv[1:] if args is None else args
    try:
        if args == ["--version"]:
            print(f"blockgate {__version__}")
        else:
            parse(args).run()
        # Here, and not when Python ends, where a reader that has gone would cost a traceback.
        sys.stdout.flush()
    except BlockgateError as error:
        return _complain(str(error))
    except KeyboardInterrupt as stop:
        # Some commands say what they have kept.
        print(": ".join(["blockgate: interrupted", *map(str, stop.args)]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return READER_GONE
    except OSError as error:
        # A folder that can't be written, a full disk: nothing of ours is wrong.
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _complain(f"{what}. Check paths and permissions.")
    return 0


def parse(args: list[str]) -> Any:
    """The command that the words of a command line ask for; its `run` does it.

    Raises:
        SystemExit: with code 0 after the help was printed, with code 2 after one line on what is wrong.
    """
    try:
        import tyro

        commands = _commands(args)
    except ImportError as error:
        raise missing_extra("the command line", error) from None
    if args in ([], ["--help"], ["-h"]):
        print(overview(DESCRIPTION, commands))
        raise SystemExit(0)
    name, *rest = args
    if name not in commands:
        wrong = invalid("command", expected=f"one of {', '.join(commands)}", got=name, remedy="See: blockgate --help")
        raise SystemExit(_complain(str(wrong)))
    prog, said = f"blockgate {name}", io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(commands[name], prog=prog, args=rest)
    except SystemExit as stop:
        if stop.code:
            _complain(in_one_line(said.getvalue(), prog))
        raise


def _complain(message: str) -> int:
    """One line, whatever the message looks like."""
    print(f"blockgate: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _forget_output() -> None:
    """Sends what is still to be written nowhere: Python writes it when it ends, and would complain of the reader."""
    with contextlib.suppress(OSError):  # not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _commands(args: list[str]) -> dict[str, Any]:
    """Name to dataclass; imported here so that `--version` starts fast."""
    from blockgate.cli.advise import Advise
    from blockgate.cli.atlas import Atlas
    from blockgate.cli.bench import Bench
    from blockgate.cli.data import Data
    from blockgate.cli.demo import Demo
    from blockgate.cli.evaluate import Evaluate
    from blockgate.cli.generate import Generate
    from blockgate.cli.info import Info
    from blockgate.cli.reproduce import Reproduce
    from blockgate.cli.selftest import Selftest
    from blockgate.cli.train import train_command

    return {
        "advise": Advise,
        "atlas": Atlas,
        "bench": Bench,
        "data": Data,
        "demo": Demo,
        "evaluate": Evaluate,
        "generate": Generate,
        "info": Info,
        "reproduce": Reproduce,
        "selftest": Selftest,
        "train": train_command(args),
    }
