"""The parent's side: in which order to measure, for how long, and what the samples say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import cast

from accumulate.bench.counting import Traffic
from accumulate.bench.plan import EVERY, ONE, SILENT, Mode, Options, windows
from accumulate.bench.ranks import Ranks
from accumulate.bench.worker import Facts, Job, build

MOST_ROUNDS = 5
NOISY = 0.15  # a spread of more than this between rounds makes a warning


@dataclass
class Cell:
    """What was measured for one mode at one number of steps: a rate per round, that of the slowest rank."""

    mode: Mode
    steps: int
    traffic: Traffic = field(default_factory=Traffic)
    rates: list[float] = field(default_factory=list)
    efficiencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Micro-batches per second and process: the median of the rounds."""
        return median(self.rates)

    @property
    def efficiency(self) -> float:
        """The rate against one process's in the same round: the median of the rounds."""
        return median(self.efficiencies)

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, over their median: efficiencies, or for one process its rates."""
        samples = self.rates if self.mode == ONE else self.efficiencies
        return (max(samples) - min(samples)) / median(samples)


@dataclass
class Result:
    """A finished run."""

    options: Options
    facts: Facts
    cells: list[Cell]
    seconds: float
    final_loss: float

    @property
    def rounds(self) -> int:
        """How many rounds were measured."""
        return len(self.cells[0].rates)

    def cell(self, mode: Mode, steps: int) -> Cell:
        """The cell of ``mode`` at ``steps``."""
        return next(cell for cell in self.cells if (cell.mode, cell.steps) == (mode, steps))


Report = Callable[[int, int, Cell], None]


def run(options: Options, progress: Report) -> Result:
    """Measure all that ``options`` ask for; ``progress(round, rounds, cell)`` is called after each sample.

    Raises:
        RankError: a rank died, raised or did not answer.
    """
    start = time.monotonic()
    with Ranks(options.ranks, build, options, timeout=options.timeout) as ranks:
        facts = cast(Facts, ranks.ask(None, "preparing")[0])
        cells = [Cell(mode, steps) for mode, steps in options.cells()]
        for mode in (SILENT, EVERY):  # the first windows build optimizer state and buckets
            ranks.ask(Job(mode, steps=1, windows=2), "warming up")
        for cell in cells:
            if not cell.mode.alone:
                cell.traffic = _count(ranks, options, cell)
        rounds, done = options.rounds or MOST_ROUNDS, 0
        began = time.monotonic()
        while done < rounds:
            for cell in cells:
                _sample(ranks, options, cell, cells)
                progress(done + 1, rounds, cell)
            done += 1
            if options.rounds is None:
                spent = time.monotonic() - began
                left = options.seconds - (time.monotonic() - start)
                rounds = min(MOST_ROUNDS, done + int(left / (spent / done)))
        final = cast(Facts, ranks.ask(None, "finishing")[0])
    return Result(options, facts, cells, time.monotonic() - start, final.loss)


def _count(ranks: Ranks[Options], options: Options, cell: Cell) -> Traffic:
    doing = f"counting {cell.mode.label(options.ranks)}, {cell.steps} steps"
    return cast(Traffic, ranks.ask(Job(cell.mode, cell.steps, count=True), doing)[0])


def _sample(ranks: Ranks[Options], options: Options, cell: Cell, cells: list[Cell]) -> None:
    """Time ``cell`` once more; one process's cell of the same steps must be sampled before in each round."""
    job = Job(cell.mode, cell.steps, windows(cell.steps))
    doing = f"measuring {cell.mode.label(options.ranks)}, {cell.steps} steps"
    seconds = cast(list[float], ranks.ask(job, doing, [0] if cell.mode.alone else None))
    cell.rates.append(job.steps * job.windows / max(seconds))
    one = next(other for other in cells if other.mode == ONE and other.steps == cell.steps)
    cell.efficiencies.append(cell.rates[-1] / one.rates[-1])
