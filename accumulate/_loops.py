"""The ``batches()`` loops of one accumulator: which one runs, what it handed out, and what one has left behind."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._errors import WindowError
from ._lookahead import Handed, Plan
from ._tally import Tally

__all__ = ["Loops"]


class Loops:
    """One loop at a time; without one, everything here is as if nothing were known about the data."""

    def __init__(self) -> None:
        self.running: object | None = None
        self.handed: Handed[Any] | None = None
        """The batch that the running loop handed out last."""
        self._may_go_on = False
        self._left: str | None = None

    @property
    def plan(self) -> Plan | None:
        """What is known about the window that opens now."""
        return None if self.handed is None else self.handed.plan

    def begin(self, loop: object, window: Tally | None) -> None:
        """A loop begins; another one that has not ended cannot go on."""
        self.check()
        if window is not None and not self._may_go_on:
            raise WindowError(
                f"batches() begins while a window is open after micro-batch {window.position} of {window.steps}. "
                "Call flush() to close it or reset() to drop it first."
            )
        self.running, self.handed = loop, None

    def end(self, loop: object, window: Tally | None, finished: bool, carry: bool) -> None:
        """A loop ends: at the end of its data, or before it."""
        if self.running is not loop:
            return
        self.running = self.handed = None
        self._may_go_on = finished and carry
        if window is not None and not finished:
            at = f"micro-batch {window.position} of {window.steps}"
            self._left = f"a batches() loop was left after {at}, by break or an exception"

    def resume(self) -> None:
        """A window has been loaded: the next loop may go on with it."""
        self.handed, self._may_go_on, self._left = None, True, None

    def check(self) -> None:
        """Raise if a loop has left a window that nobody has closed or dropped."""
        if self._left:
            raise WindowError(f"{self._left}. Call flush() to close the window or reset() to drop it.")

    def enter(self) -> bool:
        """A block is entered; whether it is for a padding batch."""
        if self.handed is None:
            return False
        if self.handed.is_done:
            raise WindowError(
                "a second step() block for one batch of batches(); put all backward() calls of a batch into one block"
            )
        return self.handed.is_padding

    def check_weight(self, weight: float | Tensor | None) -> None:
        """Raise for a weight that contradicts ``weight=fn``."""
        if self.handed is not None:
            self.handed.check_weight(weight)

    def leave(self, done: bool) -> None:
        """The block has been left; ``done`` if its micro-batch was counted or given up."""
        if self.handed is not None:
            self.handed.leave(done)

    def settle(self) -> None:
        """The open window was closed or dropped by hand."""
        self._left = None
