"""What must not happen between two micro-batches of a window, each as an error that says how to go on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ._arguments import is_zero, refuse_optimizer_in_backward
from ._errors import WindowError
from ._gradients import Gradients
from ._sync import SyncControl

if TYPE_CHECKING:
    from ._tally import Tally

__all__ = [
    "mixed",
    "no_backward",
    "not_inside",
    "not_reduced",
    "refuse_broken",
    "refuse_changed_gradients",
    "refuse_closed",
    "refuse_hooks",
    "refuse_nested",
    "still_due",
    "unfinished",
]


def refuse_nested(thread: int | None) -> None:
    """Raise if a block is open, in the thread of that number."""
    if thread is not None:
        where = "this thread" if thread == threading.get_ident() else "another thread"
        raise WindowError(f"step() entered while a step() block of {where} is open; leave that block first")


def not_inside(thread: int | None) -> WindowError:
    """The error for a loss outside a block of its own thread."""
    where = "none is open" if thread is None else "the open one belongs to another thread"
    return WindowError(f"backward() and scale() belong inside a `with acc.step():` block; {where}")


def refuse_broken(tally: Tally) -> None:
    """Raise for a window that an exception has left half done."""
    if tally.broken:
        raise WindowError(f"this window is broken: {tally.broken}. Call reset() to drop it, then repeat it.")


def refuse_closed(is_closed: bool) -> None:
    """Raise after ``close()``."""
    if is_closed:
        raise WindowError("this Accumulator is closed; construct a new one")


def no_backward() -> WindowError:
    """The error for a block that adds nothing to a window of losses without weights."""
    return WindowError(
        "this step() block ran no backward() although others of its window did; it was not counted. Leave its "
        "batch out before the block, or give every loss a weight and call backward(loss, weight=0) here."
    )


def mixed(weight: float | Tensor | None) -> WindowError:
    """The error for a loss with a weight and one without in a window that was not counted ahead."""
    if is_zero(weight):
        return WindowError(
            "weight=0 in a window whose other losses have no weight: the other ranks could not know that this "
            "micro-batch does not count. Pass weight=1 to the others, on every rank."
        )
    return WindowError(
        f"a loss with weight={weight!r} and a loss without a weight (or the reverse) in one window have no common "
        "denominator. Pass a weight to every backward() and scale() of the window, on every rank, or count ahead: "
        "acc.batches(loader, weight=fn) lets losses with a weight and mean-type losses stand side by side."
    )


def unfinished(call: str) -> WindowError:
    """The error for a call in the middle of a micro-batch."""
    return WindowError(f"{call}() inside a step() block: the micro-batch is not complete. Call it after the block.")


def refuse_changed_gradients(several: Sequence[Gradients], tally: Tally) -> None:
    """Raise if gradients are not as the last block of the window has left them."""
    if not tally.position:
        return
    for gradients in several:
        if what := gradients.changed():
            raise WindowError(
                f"gradients of {gradients.name} were {what} after micro-batch {tally.position} of {tally.steps}, "
                "inside a window. Clear them only when is_boundary is true; reset() drops this window."
            )


def still_due() -> WindowError:
    """The error for a window that would add to the gradient that was loaded at a boundary."""
    return WindowError(
        "a new window would add to the gradient that was loaded: the state was saved between the close of a window and "
        "its update. Take the update first, with optimizer_step() or by hand, or drop the gradient with zero_grad()."
    )


def refuse_hooks(several: Sequence[Gradients], steps: int) -> None:
    """Raise if an optimizer would step in the backward of each micro-batch."""
    for gradients in several:
        refuse_optimizer_in_backward(gradients.without_hooks, steps)


def not_reduced(name: str, control: SyncControl) -> str:
    """What to say of a wrapper that has no evidence of a reduction."""
    return (
        f"{name} ({type(control.module).__name__}) reduced nothing in the micro-batch that closes the window. Call the "
        "wrapper itself, not its .module, and leave its own no_sync() alone; then reset() and repeat the window."
    )


def partial(call: str, window: Tally | None) -> WindowError:
    """The error for a call that needs the complete gradient of a window."""
    position = window.position if window else 0
    return WindowError(
        f"{call}() at micro-batch {position} of a window, whose gradient is not complete yet. Call it when "
        "is_boundary is true."
    )
