"""What ``batches()`` knows ahead: this rank's next batches, and how many micro-batches all ranks have left.

What forced this design: a window must be known to be short, or longer on another rank, before its first loss is
scaled; a rank must not wait for the others' answer, so the question goes out one micro-batch before the answer is due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from ._arguments import check_count
from ._errors import AccumulateError, WindowError
from ._lengths import Wanted
from ._ranks import Ranks, Sum

__all__ = ["Extent", "Handed", "Plan", "Rest", "Stream"]

T = TypeVar("T")
_UNKNOWN = -1
_END: Any = object()


class Plan(NamedTuple):
    """Micro-batches that every rank runs: a whole window, or the part of one that an iterable holds."""

    length: int
    """On each rank, padding included."""
    real: int
    """Those with data, over all ranks."""
    steps: int
    """How many make the window full."""
    opens_window: bool
    """Whether the window begins with it; if it goes on after it, ``Tally.extend`` is told."""
    weights: Sum | None
    """The sum over all ranks of what ``weight=fn`` counted in it."""


class Rest(NamedTuple):
    """What a window that was loaded half done has still to see, all ranks together, to be the one that was planned."""

    length: int
    real: int
    weight: float | None

    def is_what_comes(self, plan: Plan) -> bool:
        """Whether ``plan`` is just that. Reads a sum of weights on the host."""
        if (plan.length, plan.real) != (self.length, self.real):
            return False
        if self.weight is None:
            return True
        return plan.weights is not None and math.isclose(plan.weights.result().item(), self.weight, rel_tol=1e-9)


class _Item(NamedTuple, Generic[T]):
    batch: T | None
    weight: float | Tensor
    error: Exception | None


class Stream(Generic[T]):
    """This rank's batches, pulled ahead as far as is asked for; an exception waits until its batch is due."""

    def __init__(self, iterable: Iterable[T], weight: Callable[[T], float | Tensor] | None) -> None:
        self._iterator = iter(iterable)
        self._is_users = self._iterator is iterable
        self._weight = weight
        self._queue: deque[_Item[T]] = deque()
        self._ended = False

    def available(self, wanted: int) -> int:
        """How many of the next ``wanted`` batches there are."""
        while len(self._queue) < wanted and not self._ended:
            self._pull()
        return min(len(self._queue), wanted)

    def _pull(self) -> None:
        try:
            batch = next(self._iterator, _END)  # with a default: a StopIteration of the weight function is no end
            if batch is _END:
                self._ended = True
                return
            weight = 1.0 if self._weight is None else check_count(self._weight(batch))
            self._queue.append(_Item(batch, weight, None))
        except Exception as error:  # noqa: BLE001 - it is raised when its batch is due, so earlier windows are whole
            self._queue.append(_Item(None, 0.0, error))
            self._ended = True

    def weigh(self, count: int) -> float | Tensor:
        """The sum of the weights of the next ``count`` batches."""
        total: float | Tensor = 0.0
        for index in range(count):
            total = total + self._queue[index].weight
        return total

    def take(self) -> tuple[T, float | Tensor]:
        """The next batch and its weight; raises ``IndexError`` at the end."""
        self.available(1)
        batch, weight, error = self._queue.popleft()
        if error is not None:
            raise error
        return batch, weight  # type: ignore[return-value]  # a batch is missing only where there is an error

    def close(self) -> None:
        """Keep no batch and no worker process alive."""
        self._queue.clear()
        self._ended = True
        if not self._is_users and callable(close := getattr(self._iterator, "close", None)):  # a generator's
            close()
        self._iterator = iter(())


class Extent(Generic[T]):
    """How many micro-batches each rank has left: known at once if all have a ``len``, else asked window by window."""

    def __init__(self, stream: Stream[T], ranks: Ranks, length: int | None, weighted: bool, carry: bool) -> None:
        self._stream = stream
        self._ranks = ranks
        self._asked: tuple[Wanted, Sum] | None = None
        self.handed = 0
        self._lengths: list[int] | None = [_UNKNOWN if length is None else length]
        if ranks.size > 1:
            first = ranks.start_counts(self._lengths[0], int(weighted), int(carry)).result().tolist()
            self._lengths, modes = [int(n) for n in first[: ranks.size]], first[ranks.size :]
            if any(mode not in (0, ranks.size) for mode in modes):
                raise AccumulateError("ranks call batches() with different weight= or last=; pass the same on each")
        if _UNKNOWN in self._lengths:
            self._lengths = None

    @property
    def needs_look_ahead(self) -> bool:
        """Whether the next window is known only when its batches have been pulled."""
        return self._lengths is None

    def runs_out(self) -> bool:
        """Count one more micro-batch on every rank; whether this rank has no batch for it."""
        has_one = self._stream.available(1) > 0
        if self._lengths is not None and has_one != (self.handed < self._lengths[self._ranks.index]):
            raise _wrong_length(self._lengths[self._ranks.index], self.handed, has_one)
        self.handed += 1
        return not has_one

    def will_be_padded(self) -> bool:
        """Whether this rank has had its last batch, and others perhaps not."""
        if self._lengths is not None:
            return self._lengths[self._ranks.index] == self.handed < max(self._lengths)
        return self._ranks.size > 1 and not self._stream.available(1)

    def check_end(self) -> None:
        """Raise if the iterable has more than its length."""
        if self._lengths is not None and self._stream.available(1):
            raise _wrong_length(self._lengths[self._ranks.index], self.handed, True)

    def ask(self, wanted: Wanted) -> None:
        """Begin to ask the other ranks how many of the next window's batches they have."""
        if self._lengths is None and self._ranks.size > 1:
            self._asked = (wanted, self._ranks.start_counts(self._available(wanted)))

    def _available(self, wanted: Wanted) -> int:
        return self._stream.available(wanted.number()) if self._stream.available(1) else 0

    def counts(self, wanted: Wanted) -> Sequence[int]:
        """How many of the batches of a window each rank has."""
        if self._lengths is not None:
            left = [max(0, length - self.handed) for length in self._lengths]
            return [min(wanted.number(), each) for each in left] if any(left) else left
        if self._ranks.size == 1:
            return [self._available(wanted)]
        if self._asked is None or self._asked[0] != wanted:
            self.ask(wanted)
        assert self._asked is not None  # just asked
        (_, answer), self._asked = self._asked, None
        return [int(count) for count in answer.result().tolist()]

    def is_empty(self) -> bool:
        """Whether no rank has another batch; waits for an answer that is on its way."""
        if self._lengths is not None:
            return self.handed >= max(self._lengths)
        if self._asked is not None:
            return not any(self._asked[1].result().tolist())
        return not self._stream.available(1)


def _wrong_length(length: int, handed: int, has_more: bool) -> AccumulateError:
    what = "it has more" if has_more else f"it ended after {handed}"
    return AccumulateError(
        f"len() of the iterable given to batches() is {length}, but {what}, and the windows of all ranks were planned "
        "by it. Correct its __len__, or pass iter(...) of it, whose batches are counted as they come."
    )


class Handed(Generic[T]):
    """The batch that a loop has handed out last, until its block is done."""

    def __init__(
        self, plan: Plan, index: int, weight: float | Tensor, extent: Extent[T], kept: Sequence[Tensor] | None
    ) -> None:
        self.plan = plan
        self.weight = weight
        """What ``weight=fn`` counted in it."""
        self.is_padding = kept is not None
        self.is_done = False
        self.is_given_up = False
        self._index = index
        self._extent = extent
        self._kept = [(buffer, buffer.clone()) for buffer in kept or ()]

    def rest(self) -> Plan:
        """What is known about a window that opens with this batch, perhaps in mid-plan after ``flush()``."""
        if not self._index:
            return self.plan
        length, steps = self.plan.length - self._index, self.plan.steps - self._index
        return self.plan._replace(length=length, steps=steps, opens_window=False)

    @property
    def is_last(self) -> bool:
        """Whether no rank is given another batch."""
        return self._index + 1 == self.plan.length and self._extent.is_empty()

    def check_weight(self, weight: float | Tensor | None) -> None:
        """Raise if a loss's weight is another number than ``weight=fn`` counted, for its window is scaled already."""
        if self.plan.weights is None or self.is_padding or not isinstance(weight, float):
            return
        is_tensor = isinstance(self.weight, Tensor)  # which is never read; a number that drops contradicts it anyway
        if (is_tensor and weight == 0) or (not is_tensor and weight != self.weight):
            counted = "a tensor" if is_tensor else f"{self.weight:g}"
            raise WindowError(
                f"backward(loss, weight={weight:g}) for a batch that batches(weight=fn) counted as {counted}; "
                "its window is scaled by that already. Pass the same number, or leave weight=fn out: then weights, 0 "
                "included, may be decided late."
            )

    def leave(self, done: bool) -> None:
        """Its block has been left; what the forward of a padding batch did to running statistics is undone."""
        self.is_done = done
        for buffer, before in self._kept:
            buffer.copy_(before)

    def give_up(self) -> None:
        """Its window was dropped, so the loop may go on without its block."""
        self.is_given_up = True
        self.leave(self.is_done)
