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
        self._carried: Tally | None = None
        """The window that the last loop has left to the next one."""
        self._left: str | None = None

    @property
    def plan(self) -> Plan | None:
        """What is known about the window that opens now."""
        return None if self.handed is None else self.handed.rest()

    def begin(self, loop: object, window: Tally | None) -> None:
        """A loop begins; another one that has not ended cannot go on."""
        self.check()
        if window is not None and window is not self._carried:
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
        self._carried = window if finished and carry else None
        if window is not None and not finished:
            self._left = f"micro-batch {window.position} of {window.steps}"

    def resume(self, window: Tally) -> None:
        """A window has been loaded, and the next loop may go on with it."""
        self._carried, self._left = window, None

    def check(self) -> None:
        """Raise if a loop has left a window that nobody has closed or dropped."""
        if self._left:
            raise WindowError(
                f"a batches() loop was left after {self._left}, by break or an exception. Call flush() to close the "
                "window or reset() to drop it."
            )

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
        """The block has been left; ``done`` if its micro-batch was counted."""
        if self.handed is not None:
            self.handed.leave(done)

    def settle(self, dropped: bool = False) -> None:
        """The open window was closed or dropped by hand; if dropped, its last batch needs no block any more."""
        self._left = None
        if dropped and self.handed is not None:
            self.handed.give_up()
