"""What an accumulator tells about itself: counters, losses, norms, its settings, and its ``repr``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from . import _arguments as arguments
from ._correction import global_mean
from ._gradients import Gradients
from ._sync import Found
from ._windows import Windows

__all__ = ["Reports"]


class Reports:
    """The half of :class:`Accumulator` that touches no gradient; the other half sets the attributes declared here."""

    _windows: Windows
    _gradients: Sequence[Gradients]
    _found: Sequence[Found]
    _grad_norm: Tensor | None

    @property
    def is_boundary(self) -> bool:
        """True inside and after the block that closes a window, until the next block is entered."""
        return self._windows.is_boundary

    @property
    def position(self) -> int:
        """The index, from 0, of the next micro-batch in the open window (inside a block: of this one)."""
        return self._windows.open.position if self._windows.open else 0

    @property
    def is_last(self) -> bool:
        """Under ``batches()``: whether this batch is the last one that this rank is given, padding included."""
        return self._windows.loops.handed is not None and self._windows.loops.handed.is_last

    @property
    def is_padding(self) -> bool:
        """Under ``batches()``: whether this batch only keeps step with ranks that have more, and counts for nothing."""
        return self._windows.loops.handed is not None and self._windows.loops.handed.is_padding

    @property
    def micro_steps(self) -> int:
        """Micro-batches counted so far, without padding."""
        return self._windows.micro_steps

    @property
    def updates(self) -> int:
        """Windows closed so far."""
        return self._windows.updates

    @property
    def loss(self) -> Tensor | None:
        """This rank's weighted mean loss of the last closed window: 0-dim, detached, on its device, no collective.

        None before the first window, or if the user scales; 0 for a window of total weight 0.
        """
        closed = self._windows.closed
        return None if closed is None else closed.mean_loss(self._gradients[0].device)

    def global_loss(self) -> Tensor | None:
        """The weighted mean loss of the last closed window over all ranks; a collective, so call it on every rank."""
        closed, device = self._windows.closed, self._gradients[0].device
        if closed is None or closed.weighted is None:
            return None
        return global_mean(self._windows.ranks, closed.sums(device)).to(device)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm at the last ``clip_grad_norm_``; None before the first."""
        return self._grad_norm

    @property
    def steps(self) -> int | Callable[[int], int]:
        """The window length as it was set; a new value takes effect when the next window opens."""
        return self._windows.lengths.setting

    @steps.setter
    def steps(self, steps: int | Callable[[int], int]) -> None:
        self._windows.lengths.setting = arguments.check_setting(steps)

    @property
    def policy(self) -> str:
        """What sharded wrappers keep between micro-batches; a new value takes effect when the next window opens."""
        return self._windows.policy

    @policy.setter
    def policy(self, policy: str) -> None:
        self._windows.policy = arguments.check_policy(policy)

    def _wrappers(self) -> list[str]:
        return [f"{type(control.module).__name__} at {name}" for name, control in self._found]

    def __repr__(self) -> str:
        windows = self._windows
        ranks = windows.ranks.size
        window = (
            "" if callable(windows.lengths.setting) else f", window={windows.lengths.setting * ranks} micro-batches"
        )
        wrappers = ", ".join(self._wrappers()) or "none"
        steps = f"steps={windows.lengths.setting}, ranks={ranks}{window}"
        return f"Accumulator({steps}, wrappers=[{wrappers}], policy={windows.policy!r})"
