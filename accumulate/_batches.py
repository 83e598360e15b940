"""The loop of ``Accumulator.batches()``: one batch after another, as many on every rank, in windows known ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ._errors import AccumulateError, WindowError
from ._lookahead import Extent, Handed, Plan, Stream
from ._windows import Windows

__all__ = ["Batches"]

T = TypeVar("T")


class Batches(Generic[T]):
    """One loop over one iterable; a rank that runs out is given its last batch again, to contribute nothing."""

    def __init__(
        self,
        windows: Windows,
        models: Iterable[nn.Module],
        iterable: Iterable[T],
        weight: Callable[[T], float | Tensor] | None,
        carry: bool,
    ) -> None:
        self._carry = carry
        self._windows = windows
        self._loops = windows.loops
        self._iterable = iterable
        self._weight = weight
        layers = [m for model in models for m in model.modules() if isinstance(m, _NormBase)]
        self._statistics = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._spare: T | None = None
        """This rank's last batch, kept from what the body does to it."""

    def run(self) -> Iterator[T]:
        """The batches, padding included."""
        finished = False
        self._windows.check_idle("batches")
        self._loops.begin(self, self._windows.open)
        stream = Stream(self._iterable, self._weight)
        try:
            self._stream = stream
            self._extent = Extent(
                stream, self._windows.ranks, _length(self._iterable), self._weight is not None, self._carry
            )
            while (plan := self._plan()) is not None:
                yield from self._hand_out(plan)
            finished = True
        finally:
            stream.close()
            self._loops.end(self, self._windows.open, finished, self._carry)

    def _plan(self) -> Plan | None:
        """The next window, or as much of it as there is data for; None at the end."""
        window = self._windows.open
        rest = None if window is None else max(1, window.steps - window.position)
        needed = self._windows.lengths.wanted(self._windows.updates, rest)
        counts = self._extent.counts(needed)
        length = max(counts)
        if not length:
            self._extent.check_end()
            return None
        if self._extent.handed == 0 and 0 in counts:
            raise AccumulateError(
                f"the ranks have {', '.join(map(str, counts))} batches for their first window: rank {counts.index(0)} "
                "has none, so nothing to pad with while others go on. Give every rank at least one batch."
            )
        wanted = needed.number()
        weights = None
        if self._weight is not None:
            weights = self._windows.ranks.start_sum([self._stream.weigh(self._stream.available(length))])
        return Plan(length, sum(counts), wanted if self._carry else length, window is None, weights)

    def _hand_out(self, plan: Plan) -> Iterator[T]:
        """The batches of a plan, up to a boundary that comes earlier."""
        if self._windows.open is not None:
            self._windows.open.extend(plan)
        for index in range(plan.length):
            batch, weight, padding = self._take()
            if self._extent.needs_look_ahead or self._weight is not None:
                self._stream.available(min(index + 1, plan.steps))  # a little at a time, not a window at once
            if index + 1 == plan.length:
                self._extent.ask(self._windows.lengths.wanted(self._windows.updates + 1))
            kept = self._statistics if padding else None
            handed = self._loops.handed = Handed(plan, index, weight, self._extent, kept)
            yield batch
            self._check_used(handed)
            if self._windows.open is None:
                return

    def _take(self) -> tuple[T, float | Tensor, bool]:
        if self._extent.runs_out():
            return cast("T", _copied(self._spare)), 0.0, True
        batch, weight = self._stream.take()
        if self._extent.will_be_padded():
            self._spare = _copied(batch)
        return batch, weight, False

    def _check_used(self, handed: Handed[T]) -> None:
        if self._loops.running is not self:
            raise WindowError("this batches() loop has ended, because another one has begun; use one at a time")
        if not (handed.is_done or handed.is_given_up):
            raise WindowError(
                "the last batch of batches() has not been through a completed step() block, on which other ranks "
                "count. To leave one out, call backward(loss, weight=0); after an exception run its block again, or "
                "call reset() on every rank."
            )


def _length(iterable: object) -> int | None:
    """How many batches it says it has."""
    try:
        return len(iterable)  # type: ignore[arg-type]  # that is what is being asked
    except TypeError:  # a generator, or a DataLoader of an IterableDataset
        return None


def _copied(batch: T) -> T:
    """The same tensors in containers of its own: a body that pops from its batch must find the next one whole."""
    copied: Any = batch
    if type(copied) in (list, tuple):
        copied = type(copied)(map(_copied, copied))
    elif type(copied) is dict:
        copied = {key: _copied(value) for key, value in copied.items()}
    elif isinstance(copied, MutableMapping):
        copied = copy.copy(copied)
    return cast("T", copied)
