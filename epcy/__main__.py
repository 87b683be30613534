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


def top(arguments: argparse.Namespace) -> int:
    """Show what running ranks do."""
    from epcy import top as screen
    from epcy.errors import EpcyError

    try:
        return screen.show(arguments.status_dir, once=arguments.once, interval_s=arguments.interval)
    except EpcyError as error:
        sys.stderr.write(f"epcy: {error}\n")
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; a command is a function of its parsed arguments."""
    main_parser = argparse.ArgumentParser(prog="python -m epcy", description="Look at epcy on this machine.")
    commands = main_parser.add_subparsers(title="commands", metavar="COMMAND")
    command = commands.add_parser(
        "info", help="versions, backends and why one does not work, the machine, the options (the default)"
    )
    for place in (main_parser, command):
        place.add_argument("--json", action="store_true", help="print JSON")
        place.set_defaults(run=info)
    command = commands.add_parser(
        "top", help="what the ranks of running jobs do, one line a rank (needs rich)"
    )
    command.add_argument(
        "--once", action="store_true", help="print one table, of the time since construction"
    )
    command.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (%(default)s)")
    command.add_argument(
        "--status-dir", metavar="DIR", help="where the status pages are, if not in the usual folder"
    )
    command.set_defaults(run=top)
    return main_parser


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
