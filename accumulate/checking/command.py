"""``python -m accumulate check FILE.py:FUNCTION``: the check of a function that returns what to check."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from .._check import check
from .._errors import AccumulateError

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
        try:
            given = function()
        except Exception:  # noqa: BLE001 - the user's code may raise anything, and 1 would mean "not equal"
            traceback.print_exc()
            parser.error(f"{parsed.target} raised an exception")
        if not isinstance(given, tuple) or len(given) != 3:
            parser.error(f"{parsed.target} must return (model, loss_fn, batch), got {type(given).__name__}")
        try:
            report = check(*given, steps=parsed.steps)
        except (AccumulateError, TypeError, ValueError) as error:
            parser.error(str(error))
    print(json.dumps(report.document(), indent=2) if parsed.json else report)
    return 0 if report.ok else 1


def _function(target: str, parser: argparse.ArgumentParser) -> Callable[[], object]:
    """Import the file as a module of its own name, beside which it can import its neighbours as a script can."""
    file, _, name = target.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        parser.error(f"expected FILE.py:FUNCTION, got {target!r}")
    if not path.is_file():
        parser.error(f"there is no file {file!r}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        parser.error(f"{file!r} is not a Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception:  # noqa: BLE001 - as above
        traceback.print_exc()
        parser.error(f"importing {file!r} raised an exception")
    function: object = getattr(module, name, None)
    if not callable(function):
        parser.error(f"{file!r} has no function {name!r}")
    return function
