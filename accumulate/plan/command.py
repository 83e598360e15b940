"""``python -m accumulate plan``: from parsed arguments to tables and files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from accumulate.plan import plot, report
from accumulate.plan.arguments import Options, options

__all__ = ["run"]


def run(parsed: argparse.Namespace, plan: argparse.ArgumentParser) -> int:
    """Compute the plan, write it, and return the exit status."""
    try:
        _write(options(parsed, plan))
    except OSError as error:
        sys.stderr.write(f"python -m accumulate plan: {error}\n")
        return 1
    return 0


def _write(given: Options) -> None:
    report.write(given, sys.stderr if given.json == "-" else sys.stdout)
    if given.json:
        text = json.dumps(report.document(given), indent=2) + "\n"
        if given.json == "-":
            sys.stdout.write(text)
        else:
            Path(given.json).write_text(text)
    if given.plot:
        plot.save(given, given.plot)
