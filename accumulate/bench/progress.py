"""Shows on stderr that the benchmark is alive: a bar with rich on a terminal, else lines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accumulate.bench.measure import Cell, Report
    from accumulate.bench.plan import Options


@contextmanager
def shown(options: Options) -> Iterator[Report]:
    """Yields the function that ``measure.run`` calls after each sample."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bar(options) as show:
            yield show
    else:
        yield _lines(options)


def _lines(options: Options) -> Report:
    start, done = time.monotonic(), list[str]()
    say = partial(print, file=sys.stderr, flush=True)
    per_step = [steps for _, steps in options.cells()]

    def show(number: int, rounds: int, cell: Cell) -> None:
        done.append(f"{cell.mode.name} {cell.rates[-1]:.1f}")
        if len(done) == per_step.count(cell.steps):
            clock = f"[{time.monotonic() - start:3.0f} s]"
            say(f"{clock} round {number}/{rounds}, {cell.steps} steps, micro-batches/s: {', '.join(done)}")
            done.clear()

    say(f"starting {options.ranks} ranks ({options.backend}), then warming up and counting ...")
    return show


@contextmanager
def _bar(options: Options) -> Iterator[Report]:
    console: Any = importlib.import_module("rich.console").Console(stderr=True)
    module = importlib.import_module("rich.progress")
    columns = (
        module.SpinnerColumn(),
        module.BarColumn(),
        module.TextColumn("{task.description}"),
        module.TimeElapsedColumn(),
    )
    with module.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"starting {options.ranks} ranks, warming up, counting", total=None)
        each = len(options.cells())

        def show(number: int, rounds: int, cell: Cell) -> None:
            what = f"{cell.steps} steps, {cell.mode.label(options.ranks)}"
            text = f"round {number}/{rounds}, {what}: {cell.rates[-1]:.1f}/s"
            bar.update(task, total=rounds * each, advance=1, description=text)

        yield show
