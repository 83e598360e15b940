"""What the window that is open on this rank has seen so far."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import is_zero
from ._errors import WindowError
from ._scaling import scaled_loss, window_scale

__all__ = ["Tally"]


class Tally:
    """The tally of one window: micro-batches, weights and losses. What a failed micro-batch added is not counted."""

    def __init__(self, steps: int, mean_weight: float | Tensor | None) -> None:
        self.steps = steps
        self.position = 0
        self.by_hand = False
        """Whether the caller decided about a boundary, so that ranks may hold unequal windows."""
        self.broken: str | None = None
        """Why this window cannot be used any more, or None."""
        self.weighted: bool | None = None
        """Whether its losses carry weights; None while none came through ``backward`` or ``scale``."""
        self.scale: float | Tensor = 1.0 / steps
        self.loss_scale: Tensor | None = None
        """The GradScaler's factor in this window's gradients; the losses here do not hold it."""
        self.terms = 0
        """The losses of the micro-batch that is under way."""
        self._mean_weight = mean_weight
        self._weight: float | Tensor = 0.0
        self._losses: list[Tensor] = []
        self._counted_terms = 0
        self._micro_weight: float | Tensor | None = None
        self._micro_losses: list[Tensor] = []

    def term(self, loss: Tensor, weight: float | Tensor | None, reduction: str) -> Tensor:
        """``loss`` scaled as a term of the micro-batch that is under way, which is now tallied."""
        if weight is None and self.weighted is False:  # what most calls are, with the least work
            scaled = loss if self.scale == 1.0 else loss * self.scale
            self.terms += 1
            self._micro_losses.append(scaled.detach())
            return scaled
        weighted = weight is not None
        if self.weighted is None:
            if self.position:
                raise WindowError(
                    f"the first {self.position} blocks of this window ran no backward() or scale(), so how their "
                    "gradients were scaled is unknown. Use backward() or scale() in all blocks of a window, or in none."
                )
            self.begin_terms(weighted)
        elif self.weighted != weighted:
            raise WindowError(_mixed(weight))
        if self.terms and not _agree(self._micro_weight, weight):
            raise WindowError(
                f"two losses of one micro-batch have the weights {self._micro_weight!r} and {weight!r}; they are terms "
                "of one sum, so give them the same weight, or use one step() block for each."
            )
        self._micro_weight = weight
        self.terms += 1
        scaled = scaled_loss(loss, self.scale, weight, reduction)
        if not is_zero(weight):
            self._micro_losses.append(scaled.detach())
        return scaled

    def begin_terms(self, weighted: bool) -> None:
        """The window's first loss decides whether its losses carry weights."""
        self.weighted = weighted
        if weighted:
            self.scale = window_scale(self.steps, self._mean_weight)

    def totals(self) -> tuple[float | Tensor, float]:
        """The weight and the number of micro-batches so far, the one under way included."""
        count = float(self.position + (self.terms > 0))
        return (self._weight_with_micro() if self.weighted else count), count

    def _weight_with_micro(self) -> float | Tensor:
        micro = self._micro_weight
        if micro is None:
            return self._weight
        return self._weight + micro

    def commit(self, by_hand: bool) -> None:
        """Count the micro-batch that just ended."""
        self.by_hand = self.by_hand or by_hand
        if self._micro_weight is not None:
            self._weight = self._weight_with_micro()
        self._losses += self._micro_losses
        self._counted_terms += self.terms
        self.position += 1
        self.terms, self._micro_weight, self._micro_losses = 0, None, []

    def discard(self) -> None:
        """Forget the micro-batch that just failed."""
        self.terms, self._micro_weight, self._micro_losses = 0, None, []
        if not self._counted_terms:
            self.weighted, self.scale = None, 1.0 / self.steps

    def mean_loss(self, device: torch.device) -> Tensor | None:
        """This rank's weighted mean loss, from terms that hold the scale already; None if the user scales."""
        if self.weighted is None:
            return None
        if not self._losses:  # every micro-batch was dropped
            return torch.zeros((), device=device)
        total = torch.stack([loss.reshape(()) for loss in self._losses]).sum()
        scaled_weight = self.scale * (self._weight if self.weighted else float(self.position))
        if isinstance(scaled_weight, Tensor):
            return torch.where(scaled_weight > 0, total / scaled_weight, torch.zeros_like(scaled_weight)).to(
                total.dtype
            )
        return total / scaled_weight if scaled_weight else torch.zeros_like(total)


def _agree(first: float | Tensor | None, second: float | Tensor | None) -> bool:
    """Whether two weights may be one: numbers are compared, tensors are never read."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor)
    return first == second


def _mixed(weight: float | Tensor | None) -> str:
    if is_zero(weight):
        return (
            "weight=0 in a window whose other losses have no weight: the other ranks could not know that this "
            "micro-batch does not count. Pass weight=1 to the others, on every rank."
        )
    return (
        f"a loss with weight={weight!r} and a loss without a weight (or the reverse) in one window have no common "
        "denominator. Pass a weight to every backward() and scale() of the window, on every rank."
    )
