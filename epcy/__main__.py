"""The command line of epcy: `python -m epcy` alone is `python -m epcy info`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence


def info(arguments: argparse.Namespace) -> int:
    """Tell what is installed and what works."""
    from epcy.info import collect, render

    found = collect()
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if arguments.json else render(found))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; a command is a function of its parsed arguments."""
    top = argparse.ArgumentParser(prog="python -m epcy", description="Look at epcy on this machine.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    command = commands.add_parser(
        "info", help="versions, backends and why one does not work, the machine, the options (the default)"
    )
    for place in (top, command):
        place.add_argument("--json", action="store_true", help="print JSON")
        place.set_defaults(run=info)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    return code


if __name__ == "__main__":
    sys.exit(main())
