"""The windows of one accumulator, one after another: opening, entering and leaving micro-batches, closing, dropping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torch import Tensor, nn

from . import _guards as guards
from ._arguments import is_zero
from ._correction import Correction
from ._drop import Drop
from ._errors import AccumulateError
from ._gradients import AllGradients
from ._lengths import Lengths
from ._loops import Loops
from ._ranks import Ranks
from ._surroundings import Surroundings
from ._sync import Found, begin
from ._tally import Tally
from ._verify import Verifier

__all__ = ["Windows"]


class Windows:
    """Counts micro-batches, decides which one closes a window, and makes the closed window's gradient exact."""

    def __init__(
        self,
        steps: int | Callable[[int], int],
        found: Sequence[Found],
        gradients: AllGradients,
        ranks: Ranks,
        models: Mapping[str, nn.Module],
        policy: str,
        verifier: Verifier | None,
        mean_weight: float | None = None,
    ) -> None:
        self.lengths = Lengths(steps)
        self.policy = policy
        self.ranks = ranks
        self.micro_steps = 0
        self.updates = 0
        self.is_boundary = False
        self.is_closed = False
        self.open: Tally | None = None
        self.closed: Tally | None = None
        """The last window that was closed, for reports."""
        self.before_opening: Callable[[], None] | None = None
        """Called before a window opens, if there is something that may speak against it."""
        self.loops = Loops()
        self._controls = [control for _, control in found]
        self._found = found
        self._gradients = gradients
        self._thread: int | None = None
        self._explicit = False
        self._started = False
        self._drop = Drop(self._controls, gradients)
        self._verifier = verifier
        self.surroundings = Surroundings(self, models, found)
        self.correction = Correction(ranks, gradients, mean_weight)
        if not callable(steps):
            guards.refuse_hooks(gradients, steps)

    def enter(self, boundary: bool | None) -> None:
        """Begin a micro-batch: decide whether it closes the window, and tell the wrappers."""
        guards.refuse_nested(self._thread)
        padding = self.loops.enter()
        tally = self.open or self._new_tally()
        self._check_usable(tally)
        due = tally.position + 1 >= tally.steps
        reduce = due if boundary is None else boundary
        tally.padding = padding
        if self._verifier is not None:
            self._verifier.enter(self.updates, tally, reduce, boundary is None and not tally.by_hand)
        if padding:
            self._drop.begin()
        begin(self._controls, reduce)
        if reduce:
            self._gradients.let_go()
        self._thread = threading.get_ident()
        # Where ranks count alone, windows closed by hand may be unequal; under batches() the plan's end is not by hand.
        self._explicit = boundary is not None and (self.loops.handed is None or reduce != due)
        self.open, self.is_boundary = tally, reduce
        self._started = False

    def leave(self, failed: bool) -> None:
        """End a micro-batch: put every flag back, then count it, close the window, or mark it broken."""
        self._thread = None
        for control in reversed(self._controls):
            control.end()
        if self._drop.is_used:
            self._drop.end()
        tally = self._opened()
        self.loops.leave(done=False)
        if failed or tally.broken:
            self._fail(tally)
            return
        if tally.weighted is False and not tally.terms:
            self._fail(tally)
            raise guards.no_backward()
        self.loops.leave(done=True)
        tally.commit(self._explicit)
        self.micro_steps += not tally.padding
        if self.is_boundary:
            self._close(tally, flush=False)
            return
        self._gradients.remember()

    def _fail(self, tally: Tally) -> None:
        """An exception left the block: the micro-batch is not counted, and may have left half a gradient behind."""
        self.is_boundary = False
        self.correction.forget()
        if not tally.broken and (
            self._started or any(c.disturbed for c in self._controls) or any(g.changed() for g in self._gradients)
        ):
            tally.broken = f"an exception left micro-batch {tally.position + 1} of {tally.steps} half done"
        tally.discard()
        if not tally.broken and not tally.position:
            self.open = None

    def term(self, loss: Tensor, weight: float | Tensor | None, reduction: str) -> Tensor:
        """One loss of the micro-batch that is under way, scaled."""
        if self._thread != threading.get_ident():
            raise guards.not_inside(self._thread)
        tally = self._opened()
        if tally.position and not tally.terms:
            self._check_usable(tally)  # zero_grad() at the top of the block
        self.loops.check_weight(weight)
        scaled = tally.pad(loss, weight) if tally.padding else tally.term(loss, weight, reduction)
        if self.is_boundary and (self._explicit or not tally.is_exact):
            self.correction.start(tally)
        if not is_zero(weight):
            return scaled
        return self._drop.replace(scaled, self.is_boundary)

    def begin_backward(self, retain: bool) -> bool:
        """Whether the loss just scaled needs its backward; from here on an exception breaks the window."""
        if self.is_boundary and self._started:
            for control in self._controls:
                if control.before_another_backward is not None:
                    control.before_another_backward()
        for control in self._controls:
            control.backwards += 2 if retain else 1
        self._started = not self._drop.skips_backward
        return self._started

    def break_off(self) -> None:
        """Backward raised: what it left in the gradients cannot be told apart, even if the caller goes on."""
        tally = self._opened()
        tally.broken = f"backward of micro-batch {tally.position + 1} of {tally.steps} raised an exception"

    def flush(self) -> bool:
        """Close what is open on any rank; True if there was something."""
        self.refuse_inside("flush")
        tally = self.open or Tally(1, None)  # a callable is not asked for a window that may never open
        self._check_usable(tally, by_hand=True)
        found, weighted = self.correction.agree(tally)
        self.loops.settle()
        if not found:
            return False
        if self.open is None:  # this rank has no micro-batch of a window that others have opened
            tally = self._new_tally()
        if tally.weighted is None and weighted is not None:
            tally.adopt(weighted)
        tally.by_hand = self.is_boundary = True
        self._close(tally, flush=True)
        return True

    def reset(self) -> None:
        """Drop the open window, its gradients and its hidden sums."""
        self.refuse_inside("reset")
        self.loops.settle(dropped=True)
        if self.open is None:
            return
        for control in self._controls:
            control.reset()
        self._gradients.drop()
        self.open, self.is_boundary = None, False
        self.correction.forget()

    def close(self) -> None:
        """Drop an open window and refuse every later block."""
        self.refuse_inside("close")
        self.is_closed = True
        self.surroundings.close()
        with suppress(AccumulateError):  # an FSDP1 model that an exception has left unusable
            self.reset()

    def check_idle(self, call: str) -> None:
        """Raise if the accumulator is closed or in the middle of a micro-batch."""
        self.refuse_inside(call)
        guards.refuse_closed(self.is_closed)

    def at_boundary(self, call: str) -> bool:
        """Whether a window has been closed and no later one has begun; raises inside a block."""
        self.refuse_inside(call)
        return self.is_boundary

    def require_boundary(self, call: str) -> None:
        """Raise unless a window has been closed and no later one has begun."""
        if not self.at_boundary(call):
            raise guards.partial(call, self.open)

    def _close(self, tally: Tally, flush: bool) -> None:
        try:
            for name, control in self._found:
                if flush:
                    control.flush()
                elif not control.finish():
                    raise AccumulateError(guards.not_reduced(name, control))
            self.correction.apply(tally)
            if self._verifier is not None:
                self._verifier.compare()
        except BaseException:
            tally.broken = "its last micro-batch could not be reduced"
            self.is_boundary = False
            raise
        finally:
            self.correction.forget()
            self._gradients.let_go()
        self.open, self.closed = None, tally
        self.updates += 1
        self.surroundings.is_updated = False
        for gradients in self._gradients:
            gradients.close()

    def _new_tally(self) -> Tally:
        self.surroundings.check()
        if self.before_opening is not None:
            self.before_opening()
        for control in self._controls:
            control.policy = self.policy
        plan = self.loops.plan
        steps = self.lengths.of(self.updates) if plan is None else plan.steps
        guards.refuse_hooks(self._gradients, steps)
        self._gradients.remember()
        return Tally(steps, self.correction.mean_weight, plan, self.ranks.size)

    def _opened(self) -> Tally:
        assert self.open is not None  # a block is open, and blocks are entered with a tally
        return self.open

    def _check_usable(self, tally: Tally, by_hand: bool = False) -> None:
        guards.refuse_closed(self.is_closed)
        if not by_hand:
            self.loops.check()
        guards.refuse_broken(tally)
        guards.refuse_changed_gradients(self._gradients, tally)

    def refuse_inside(self, call: str) -> None:
        """Raise in the middle of a micro-batch."""
        if self._thread is not None:
            raise guards.unfinished(call)
