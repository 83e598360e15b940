"""What a window has to do with a ``GradScaler``: one factor for all of it, unscaled once, one update, equal on all
ranks.

A window keeps the factor that it began with, whatever happens to the scaler meanwhile (another accumulator may
share it): before its gradients are unscaled, they are multiplied by present factor / own factor if that is not
known to be 1. So nobody's update has to wait for anybody's window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import GradScaler

from ._errors import WindowError
from ._grad_scaler import Found, attach, detach
from ._gradients import Gradients, Part
from ._ranks import Ranks
from ._tally import Tally
from ._windows import Windows

__all__ = ["FIRST_WEIGHT", "Amp"]

FIRST_WEIGHT = 1024.0
"""What a micro-batch is taken to weigh before the first weighted window has closed. All ranks know it, a power of two
rounds nothing, and it lies between samples and tokens: with 1, thousands of tokens overflow float16 at once."""


class Amp:
    """One accumulator's part in its scaler."""

    def __init__(self, scaler: GradScaler, windows: Windows, gradients: Sequence[Gradients], ranks: Ranks) -> None:
        self._windows = windows
        self._gradients = gradients
        self._ranks = ranks
        self._params = {id(p) for each in gradients for p in each.params}
        self._factor: Tensor | None = None
        """The factor of the last window that this rank has scaled, and the scaler's moment then."""
        self._moment = (0, 0)
        self._closed: Tally | None = None
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._optimizers: set[int] = set()
        self._waiting: set[int] = set()
        """Parameters that no optimizer has taken in the closed window although one has taken others."""
        self._left_out: set[int] = set()
        """Parameters that no optimizer took in an earlier window, so that no update waits for them."""
        self._scaler = attach(scaler, self)

    def release(self) -> None:
        """Leave the scaler as it was found, if nobody else accumulates with it."""
        self.settle()
        detach(self._scaler, self)

    # -- the loss -----------------------------------------------------------------------------------------------------

    def term(self, loss: Tensor, weight: float | Tensor | None, reduction: str) -> Tensor:
        """The loss as a term of the window's sum, times the factor that the scaler had when the window began."""
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # a factor of 65536 is infinite in float16
        term = self._windows.term(loss, weight, reduction)
        tally = self._windows.open
        assert tally is not None  # the term was just tallied
        if tally.loss_scale is None:
            tally.loss_scale = self._factor = self._scaler.factor(term.device)
            self._moment = self._scaler.moment()
        return term * tally.loss_scale.to(term.device)

    def share_factor(self) -> None:
        """Tell a rank without any micro-batch of a flushed window which factor the others' gradients hold."""
        tally = self._windows.closed
        if tally is None or not self._ranks.groups:
            return
        factor = tally.loss_scale
        values = [0.0 if factor is None else factor, float(factor is not None)]
        total, count = self._ranks.start_sum(values).result()
        if factor is None and count.item():  # else the user scales
            tally.loss_scale = (total / count).float()

    # -- the gradients ------------------------------------------------------------------------------------------------

    def owns(self, optimizer: optim.Optimizer) -> bool:
        """Whether the optimizer has parameters of this accumulator."""
        return any(id(p) in self._params for p in _params(optimizer))

    def before_unscale(self, optimizer: optim.Optimizer) -> None:
        """Raise in mid-window; else make the optimizer's gradients hold the scaler's present factor."""
        if (tally := self._windows.open) is not None:
            raise WindowError(
                f"the scaler was asked to unscale or step at micro-batch {tally.position} of {tally.steps} of a "
                "window, whose gradient is not complete yet. Call scaler.unscale_() and scaler.step() when is_boundary "
                "is true."
            )
        self._follow()
        own = [p for p in _params(optimizer) if id(p) in self._params and id(p) not in self._unscaled]
        held = None if self._closed is None else self._closed.loss_scale
        is_present = held is self._factor and self._moment == self._scaler.moment()
        if held is not None and not is_present:
            ratio = self._scaler.factor(held.device) / held
            for grad in (p.grad for p in own if p.grad is not None):
                grad.mul_(ratio.to(grad.device))
        self._unscaled.update(map(id, own))

    @property
    def has_unscaled(self) -> bool:
        """Whether gradients of the closed window have been unscaled."""
        self._follow()
        return bool(self._unscaled)

    def agree(self, found: Found) -> None:
        """Let all ranks find what one of them has found."""
        if self._ranks.groups:
            _write(found, self._ranks.start_sum([_any([found])]).result()[0] > 0)

    def norms(self, part: Part, norm_type: float) -> Iterator[Tensor]:
        """The norm of a part of the gradient without the scaler's factor, in one piece or two."""
        self._follow()
        unscaled = Part(part.shard_group, [p for p in part.params if id(p) in self._unscaled])
        scaled = Part(part.shard_group, [p for p in part.params if id(p) not in self._unscaled])
        if unscaled.params:
            yield unscaled.norm(norm_type)
        if scaled.params:
            held = None if self._closed is None else self._closed.loss_scale
            norm = scaled.norm(norm_type)
            yield norm / (self._scaler.factor(norm.device) if held is None else held.to(norm.device))

    def _follow(self) -> None:
        """Forget what belongs to an earlier window."""
        if self._closed is not self._windows.closed:
            self._closed = self._windows.closed
            self._unscaled, self._stepped, self._optimizers = set(), set(), set()

    # -- the update ---------------------------------------------------------------------------------------------------

    def unscale(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Unscale the gradients of those optimizers for which that is not done."""
        self._follow()
        self._scaler.factor(self._gradients[0].device)  # a rank without any micro-batch has not called scale() yet
        for optimizer in optimizers:
            own = {id(p) for p in _params(optimizer)} & self._params
            if own and own <= self._unscaled and not self._scaler.is_unscaled(optimizer):
                raise WindowError(
                    f"the gradients of {type(optimizer).__name__} were unscaled in this window already, and "
                    "scaler.update() was called since. Leave update() to optimizer_step(), or do all of it yourself."
                )
            self._scaler.unscale_once(optimizer)

    def step(self, optimizers: Sequence[optim.Optimizer]) -> bool:
        """Step all of them, or none if any gradient of theirs is not finite on any rank; True if they stepped."""
        every = [self._scaler.unscale_once(optimizer) for optimizer in optimizers]
        bad = _any(every)
        for found in every:
            _write(found, bad)
        for optimizer in optimizers:
            self._scaler.torch_scaler.step(optimizer)
        self._count(optimizers)
        return not bad.item()

    def _count(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Update the scaler once the window's last optimizer has stepped."""
        self._optimizers.update(map(id, optimizers))
        stepped = {id(p) for optimizer in optimizers for p in _params(optimizer)}
        self._stepped |= stepped
        self._left_out -= stepped
        # Not by what has a gradient: ranks may differ in that, and all must update the scaler at the same time.
        learning = {id(p) for each in self._gradients for p in each.params if p.requires_grad}
        self._waiting = learning - self._stepped - self._left_out
        if not self._waiting:
            self._scaler.update(self._optimizers)

    def settle(self) -> None:
        """Update the scaler without waiting any longer for optimizers that have not come."""
        if self._waiting:
            self._left_out |= self._waiting
            self._waiting = set()
            self._scaler.update(self._optimizers)


def _params(optimizer: optim.Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _any(several: Sequence[Found]) -> Tensor:
    """Whether something was found anywhere, as a 0-dim tensor: the host does not wait for it."""
    flags = [flag.reshape(()) for found in several for flag in found.values()]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).sum() > 0


def _write(found: Found, bad: Tensor) -> None:
    """Make what was found a 1 or a 0 in sum.

    Fused optimizers do not skip for a 2, which is what a sum over ranks may be, and raise for the shape that
    ShardedGradScaler gives it (torch 2.13).
    """
    for device in found:
        found[device] = bad.to(device, torch.float32)
        bad = torch.zeros_like(bad)
