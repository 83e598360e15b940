"""``python -m accumulate check FILE.py:FUNCTION``: the check of a function that returns what to check."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from .._check import check

__all__ = ["declare", "run"]

ABOUT = """\
Does a window of micro-batches give your model the gradient of one big batch? If not, why not?

FUNCTION, in FILE.py, takes no argument and returns (model, loss_fn, batch), where loss_fn(model, *batch) returns a loss
or (loss, weight), and batch is a tuple of tensors whose first dimension counts the samples.
"""
EXAMPLES = """\
examples:
  python -m accumulate check train.py:sample             in words
  python -m accumulate check train.py:sample --steps 8   with eight micro-batches instead of four
  python -m accumulate check train.py:sample --json      for programs

exit status: 0 the gradients are equal, 1 they are not, 2 nothing could be compared
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, and a help text that says what the function must return."""
    parser.description, parser.epilog = ABOUT, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="what returns (model, loss_fn, batch)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="micro-batches in the window (default: 4)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON; all else goes to stderr")


def run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check what the function returns, print the report, and return the exit status."""
    with redirect_stdout(sys.stderr) if parsed.json else nullcontext():
        function = _function(parsed.target, parser)
        with _reported(parsed.target, parser):
            given = function()
        if not isinstance(given, tuple) or len(given) != 3:
            parser.error(f"{parsed.target} must return (model, loss_fn, batch), got {type(given).__name__}")
        with _reported("the check", parser):
            report = check(*given, steps=parsed.steps)
    print(json.dumps(report.document(), indent=2) if parsed.json else report)
    return 0 if report.ok else 1


@contextmanager
def _reported(what: str, parser: argparse.ArgumentParser) -> Iterator[None]:
    """The user's code may raise anything, or exit; status 0 or 1 would be taken for a verdict."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is shown
        if _is_ours(error):
            parser.error(str(error))
        traceback.print_exc()
        parser.error(f"{what} raised an exception")


def _is_ours(error: BaseException) -> bool:
    """Whether this library raised it, so that its message says enough."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised_in).is_relative_to(Path(__file__).parents[1])


def _function(target: str, parser: argparse.ArgumentParser) -> Callable[[], object]:
    """Import the file as a module of its own name, beside which it can import its neighbours as a script can."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        parser.error(f"expected FILE.py:FUNCTION, got {target!r}")
    if not path.is_file():
        parser.error(f"there is no file {file!r}")
    sys.path.insert(0, str(path.resolve().parent))
    module_name = path.stem if path.stem not in sys.modules else f"checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        parser.error(f"{file!r} is not a Python file")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    with _reported(file, parser):
        spec.loader.exec_module(module)
    function: object = getattr(module, name, None)
    if not callable(function):
        parser.error(f"{file!r} has no function {name!r}")
    return function
