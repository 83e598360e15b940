"""The windows of one accumulator, one after another: opening, entering and leaving micro-batches, closing, dropping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from ._arguments import check_steps, is_zero, refuse_optimizer_in_backward
from ._correction import Correction
from ._drop import Drop
from ._errors import AccumulateError, WindowError
from ._gradients import Gradients
from ._ranks import Ranks
from ._sync import Found, not_reduced
from ._tally import Tally

__all__ = ["Windows"]


class Windows:
    """Counts micro-batches, decides which one closes a window, and makes the closed window's gradient exact."""

    def __init__(
        self,
        steps: int | Callable[[int], int],
        found: Sequence[Found],
        gradients: Sequence[Gradients],
        ranks: Ranks,
        mean_weight: float | None = None,
    ) -> None:
        self.steps = steps
        self.ranks = ranks
        self.micro_steps = 0
        self.updates = 0
        self.is_boundary = False
        self.is_closed = False
        self.open: Tally | None = None
        self.closed: Tally | None = None
        """The last window that was closed, for reports."""
        self._controls = [control for _, control in found]
        self._found = found
        self._gradients = gradients
        self._thread: int | None = None
        self._explicit = False
        self._started = False
        self._drop = Drop(self._controls, gradients)
        self._correction = Correction(ranks, gradients, mean_weight)
        if not callable(steps):
            self._refuse_optimizer_in_backward(steps)

    def enter(self, boundary: bool | None) -> None:
        """Begin a micro-batch: decide whether it closes the window, and tell the wrappers."""
        if self._thread is not None:
            where = "this thread" if self._thread == threading.get_ident() else "another thread"
            raise WindowError(f"step() entered while a step() block of {where} is open; leave that block first")
        tally = self.open or self._new_tally()
        self._check_usable(tally)
        reduce = tally.position + 1 >= tally.steps if boundary is None else boundary
        self._begin_controls(reduce)
        if reduce:
            self._let_go()
        self._thread = threading.get_ident()
        self.open, self.is_boundary, self._explicit = tally, reduce, boundary is not None
        self._started = False

    def _begin_controls(self, reduce: bool) -> None:
        begun = []
        try:
            for control in self._controls:
                control.begin(reduce)
                begun.append(control)
        except BaseException:
            for control in reversed(begun):
                control.end()
            raise

    def leave(self, failed: bool) -> None:
        """End a micro-batch: put every flag back, then count it, close the window, or mark it broken."""
        self._thread = None
        for control in reversed(self._controls):
            control.end()
        if self._drop.is_used:
            self._drop.end()
        tally = self._opened()
        if failed or tally.broken:
            self._fail(tally)
            return
        if tally.weighted is False and not tally.terms:
            self._fail(tally)
            raise WindowError(
                "this step() block ran no backward() although others of its window did; it was not counted. Leave its "
                "batch out before the block, or give every loss a weight and call backward(loss, weight=0) here."
            )
        tally.commit(self._explicit)
        self.micro_steps += 1
        if self.is_boundary:
            self._close(tally, flush=False)
            return
        for gradients in self._gradients:
            gradients.remember()

    def _fail(self, tally: Tally) -> None:
        """An exception left the block: the micro-batch is not counted, and may have left half a gradient behind."""
        self.is_boundary = False
        self._correction.forget()
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
            where = "none is open" if self._thread is None else "the open one belongs to another thread"
            raise WindowError(f"backward() and scale() belong inside a `with acc.step():` block; {where}")
        tally = self._opened()
        if tally.position and not tally.terms:
            self._check_usable(tally)  # zero_grad() at the top of the block
        scaled = tally.term(loss, weight, reduction)
        if self.is_boundary and (tally.weighted or tally.by_hand or self._explicit):
            self._correction.start(tally)
        return scaled if weight is None or not is_zero(weight) else self._drop.replace(scaled, self.is_boundary)

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
        tally = self.open or self._new_tally()
        self._check_usable(tally)
        if not self._correction.agree(tally):
            self._let_go()
            return False
        tally.by_hand = self.is_boundary = True
        self._close(tally, flush=True)
        return True

    def reset(self) -> None:
        """Drop the open window, its gradients and its hidden sums."""
        self.refuse_inside("reset")
        if self.open is None:
            return
        for control in self._controls:
            control.reset()
        self._let_go()
        for gradients in self._gradients:
            gradients.drop()
        self.open, self.is_boundary = None, False
        self._correction.forget()

    def close(self) -> None:
        """Drop an open window and refuse every later block."""
        self.refuse_inside("close")
        self.is_closed = True
        with suppress(AccumulateError):  # an FSDP1 model that an exception has left unusable
            self.reset()

    def at_boundary(self, call: str) -> bool:
        """Whether a window has been closed and no later one has begun; raises inside a block."""
        self.refuse_inside(call)
        return self.is_boundary

    def require_boundary(self, call: str) -> None:
        """Raise unless a window has been closed and no later one has begun."""
        if not self.at_boundary(call):
            position = self.open.position if self.open else 0
            raise WindowError(
                f"{call}() at micro-batch {position} of a window, whose gradient is not complete yet. Call it when "
                "is_boundary is true."
            )

    def _close(self, tally: Tally, flush: bool) -> None:
        try:
            for name, control in self._found:
                if flush:
                    control.flush()
                elif not control.finish():
                    raise AccumulateError(not_reduced(name, control))
            self._correction.apply(tally)
        except BaseException:
            tally.broken = "its last micro-batch could not be reduced"
            self.is_boundary = False
            raise
        finally:
            self._correction.forget()
            self._let_go()
        self.open, self.closed = None, tally
        self.updates += 1

    def _new_tally(self) -> Tally:
        steps = check_steps(self.steps(self.updates) if callable(self.steps) else self.steps)
        self._refuse_optimizer_in_backward(steps)
        for gradients in self._gradients:
            gradients.remember()
        return Tally(steps, self._correction.mean_weight)

    def _opened(self) -> Tally:
        assert self.open is not None  # a block is open, and blocks are entered with a tally
        return self.open

    def _let_go(self) -> None:
        for gradients in self._gradients:
            gradients.let_go()

    def _check_usable(self, tally: Tally) -> None:
        if self.is_closed:
            raise WindowError("this Accumulator is closed; construct a new one")
        if tally.broken:
            raise WindowError(f"this window is broken: {tally.broken}. Call reset() to drop it, then repeat it.")
        if not tally.position:
            return
        for gradients in self._gradients:
            if what := gradients.changed():
                raise WindowError(
                    f"gradients of {gradients.name} were {what} after micro-batch {tally.position} of {tally.steps}, "
                    "inside a window. Clear them only when is_boundary is true; reset() drops this window."
                )

    def refuse_inside(self, call: str) -> None:
        """Raise in the middle of a micro-batch."""
        if self._thread is not None:
            raise WindowError(
                f"{call}() inside a step() block: the micro-batch is not complete. Call it after the block."
            )

    def _refuse_optimizer_in_backward(self, steps: int) -> None:
        for gradients in self._gradients:
            refuse_optimizer_in_backward(gradients.without_hooks, steps)
