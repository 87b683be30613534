"""The command line of epcy: `python -m epcy` alone is `python -m epcy info`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from epcy.command_line import FAILURES, parse, positive, report, whole

MOST_SECONDS = 1e9


def info(arguments: argparse.Namespace) -> int:
    """Tell what is installed and what works."""
    from epcy.info import collect, render

    found = collect()
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if arguments.json else render(found))
    return 0


def top(arguments: argparse.Namespace) -> int:
    """Show what running ranks do."""
    from epcy import top as screen

    return screen.show(arguments.status_dir, once=arguments.once, interval_s=arguments.interval)


def doctor(arguments: argparse.Namespace) -> int:
    """Tell whether this machine, or this job, is set up as it should be."""
    from epcy.doctor.report import main as examine

    return examine(arguments.json, arguments.strict, arguments.root)


def replay(arguments: argparse.Namespace) -> int:
    """Replay a recording in a job that is started for it, or shrink it."""
    from epcy import replay as jobs

    return jobs.main(arguments)


def simulate(arguments: argparse.Namespace) -> int:
    """Tell what dispatch and combine should take on many nodes."""
    from epcy.simulate.report import main as predict

    return predict(arguments)


class Progress:
    """A bar of the seconds that a measurement takes, on standard error of rank 0; nothing where tqdm is missing."""

    def __init__(self, seconds: float, is_shown: bool) -> None:
        self.start, self.bar = time.monotonic(), None
        if is_shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(
                total=seconds, unit="s", bar_format="{desc:<32} |{bar}| {n:.0f} of {total:.0f} s", leave=False
            )

    def step(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_description_str(text)
            self.bar.update(min(time.monotonic() - self.start, self.bar.total) - self.bar.n)

    def say(self, text: str) -> None:
        """Print a line without harm to the bar."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def measure(arguments: argparse.Namespace) -> int:
    """Run `calibrate` or `tune`, on all ranks under mpiexec."""
    from mpi4py import MPI

    from epcy import calibrate, tune
    from epcy.errors import EpcyError

    comm = MPI.COMM_WORLD
    progress = Progress(arguments.seconds, comm.rank == 0)

    def say(text: str) -> None:
        if comm.rank == 0:
            progress.say(text)

    try:
        if arguments.command == "calibrate":
            found = calibrate.calibrate(comm, arguments.backend, arguments.seconds, progress.step, say)
            for subject, c in found.items():
                rates = ", ".join(
                    f"{g:.1f} ({n / 1e6:.1f} MB)" for n, g in zip(c.sizes_bytes, c.gbps, strict=True)
                )
                cast = f", {c.element_ps:.0f} ps an element cast to fp8" if c.element_ps else ""
                staged = f", staged at {c.stage_gbps:.1f} GB/s" if c.stage_gbps else ""
                host = f", the host {c.host_us:.1f} us" if c.host_us else ""
                more = f"{c.lane_ns:.2f} ns a lane{cast}{staged}"
                say(f"{subject}: {c.fixed_us:.1f} us a call{host}, {more}; GB/s: {rates}")
        else:
            sizes = {"hidden": arguments.hidden, "num_experts": arguments.experts, "num_topk": arguments.topk}
            tune.tune(
                comm, arguments.tokens, seconds=arguments.seconds, say=say, step=progress.step,
                backend=arguments.backend, **sizes,
            )  # fmt: skip
    except (EpcyError, *FAILURES) as error:
        progress.close()
        return report("epcy", error, comm)
    finally:
        progress.close()
    return 0


_seconds = positive("seconds", MOST_SECONDS)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; a command is a function of its parsed arguments."""
    from epcy.simulate.report import add_arguments

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
    command.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds (%(default)s)")
    command.add_argument(
        "--status-dir", metavar="DIR", help="where the status pages are, if not in the usual folder"
    )
    command.set_defaults(run=top)
    command = commands.add_parser(
        "doctor",
        help="whether this machine is set up as it should be, and what to do; under mpiexec, all ranks' machines",
        epilog="exit status: 0, 1 where something fails (--strict: is not ok), 2 where a rank did not come",
    )
    command.add_argument("--json", action="store_true", help="print JSON, with all that was read")
    command.add_argument("--strict", action="store_true", help="a warning too makes the exit status 1")
    command.add_argument(
        "--root", default="/", metavar="DIR", help="read DIR/sys, DIR/proc, DIR/dev (%(default)s)"
    )
    command.set_defaults(run=doctor)
    command = commands.add_parser(
        "replay",
        help="make the calls of a recording again in a job that this starts; or find the part of it that fails",
        epilog="exit status: that of the replay; with --shrink 0, or 1 where it does not fail",
    )
    command.add_argument(
        "file", metavar="FILE", help="what epcy.record wrote; of its parts, the name without .rankN"
    )
    command.add_argument("--shrink", action="store_true", help="try smaller and smaller ones that still fail")
    command.add_argument("--output", metavar="FILE", help="where the smallest goes (FILE.shrunk.npz)")
    command.add_argument("--ranks", type=whole(1), metavar="N", help="how many (as recorded)")
    command.add_argument(
        "--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)"
    )
    command.add_argument("--launcher", metavar="WORDS", help="what starts ranks, before -n N (mpiexec)")
    command.add_argument(
        "--timeout", type=_seconds, default=20.0, metavar="S", help="that a call may wait (%(default)s)"
    )
    command.add_argument(
        "--seconds", type=_seconds, default=300.0, metavar="S", help="for all of --shrink (%(default)s)"
    )
    command.set_defaults(run=replay)
    command = commands.add_parser(
        "simulate",
        help="what dispatch and combine should take on so many nodes; memory and queue pairs by ranks",
        description="Predict dispatch and combine on nodes that are not at hand: docs/simulate.md.",
    )
    add_arguments(command)
    command.set_defaults(run=simulate)
    for name, text, seconds in (
        ("calibrate", "measure what buf.explain() predicts with, on this machine and so many ranks", 20.0),
        (
            "tune",
            "find the knobs with which calls of a shape are fastest; Buffers use them from then on",
            30.0,
        ),
    ):
        command = commands.add_parser(name, help=text, description=f"{text}; under mpiexec, with -m mpi4py")
        command.add_argument(
            "--backend", choices=("host", "nvshmem"), help="what moves the tokens (epcy's choice)"
        )
        command.add_argument(
            "--seconds", type=_seconds, default=seconds, metavar="S", help="how long, about (%(default)s)"
        )
        command.set_defaults(run=measure, command=name)
    for flag, default, text in (
        ("--tokens", 4096, "tokens a rank"),
        ("--hidden", 7168, "elements of a token"),
        ("--experts", 256, "experts of all ranks"),
        ("--topk", 8, "experts of a token"),
    ):
        command.add_argument(flag, type=whole(1), default=default, metavar="N", help=f"{text} (%(default)s)")
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from epcy.errors import EpcyError

    arguments = parse(parser(), argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (EpcyError, *FAILURES) as error:
        code = report("epcy", error)
    return code


if __name__ == "__main__":
    sys.exit(main())
