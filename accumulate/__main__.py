"""The command line: ``python -m accumulate bench``, ``check`` and ``plan``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from accumulate.bench import arguments, plot, progress
from accumulate.bench.ranks import RankError
from accumulate.checking import command as checking
from accumulate.plan import arguments as plan_arguments, command as plan_command

if TYPE_CHECKING:
    from accumulate.bench.measure import Result
    from accumulate.bench.plan import Options


class _Terminated(BaseException):
    """SIGTERM arrived; ``status`` is the exit status that says so."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    about = "N micro-batches, one exact gradient, one reduction."
    parser = argparse.ArgumentParser(prog="python -m accumulate", description=about)
    commands = parser.add_subparsers(dest="command", metavar="command")
    text = "compare reducing always, once by hand, and once by accumulate, on this machine"
    bench = commands.add_parser("bench", help=text)
    arguments.declare(bench)
    check = commands.add_parser("check", help="compare micro-batches with one big batch, on your model")
    checking.declare(check)
    plan = commands.add_parser("plan", help="how long a window a cluster needs, computed before you rent it")
    plan_arguments.declare(plan)
    parsed = parser.parse_args(given)
    if parsed.command is None:
        parser.print_help()
        return 2
    if parsed.command == "check":
        return checking.run(parsed, check)
    if parsed.command == "plan":
        return plan_command.run(parsed, plan)
    return _bench(parsed, bench)


def _bench(parsed: argparse.Namespace, bench: argparse.ArgumentParser) -> int:
    """Run it, and turn every way in which it can end early into one message and an exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        _measure(arguments.options(parsed, bench), parsed)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only spoil the exit
        return _fail("interrupted; all ranks were stopped.", 130)
    except _Terminated as ended:
        return _fail("terminated; all ranks were stopped.", ended.status)
    except RankError as error:
        return _fail(f"{error}\nAll ranks were stopped.", 1)
    except OSError as error:
        return _fail(str(error), 1)
    return 0


def _measure(options: Options, parsed: argparse.Namespace) -> None:
    from accumulate.bench.measure import run  # not at the top: it imports FSDP, a second that --help can save

    with progress.shown(options) as show:
        result = run(options, show)
    _write(result, parsed)


def _write(result: Result, parsed: argparse.Namespace) -> None:
    from accumulate.bench import report

    print(report.table(result), file=sys.stderr if parsed.json == "-" else sys.stdout, flush=True)
    if parsed.json:
        text = json.dumps(report.document(result), indent=2) + "\n"
        if parsed.json == "-":
            sys.stdout.write(text)
        else:
            Path(parsed.json).write_text(text)
    if parsed.plot:
        plot.save(result, parsed.plot)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated(128 + number)  # an exception, so that the ranks are stopped on the way out


def _fail(message: str, status: int) -> int:
    print(f"python -m accumulate bench: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
