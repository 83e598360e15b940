"""What the window that is open on this rank has seen so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from ._arguments import is_zero
from ._errors import WindowError
from ._guards import mixed
from ._lookahead import Plan, Rest
from ._ranks import Sum
from ._scaling import counted_scale, scaled_loss, window_scale

__all__ = ["Tally"]


class Tally:
    """The tally of one window: micro-batches, weights and losses. What a failed micro-batch added is not counted."""

    # What is saved of a window between two micro-batches, by attribute, with the types that each may have. A field of
    # __init__ that outlives a micro-batch goes in here, and _schema.VERSION up by one if older states must not be read.
    SAVED: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "steps": (int,),
        "position": (int,),
        "padded": (int,),
        "by_hand": (bool,),
        "weighted": (bool, type(None)),
        "has_means": (bool,),
        "planned": (int, type(None)),
        "count_scale": (float,),
        "scale": (float, Tensor),
        "loss_scale": (Tensor, type(None)),
        "_weight": (float, Tensor),
        "_counted": (Tensor, type(None)),
        "_counted_terms": (int,),
        "_losses": (Tensor, type(None)),
        "_means": (Tensor, type(None)),
    }

    def __init__(
        self, steps: int, mean_weight: float | Tensor | None, plan: Plan | None = None, ranks: int = 1
    ) -> None:
        self.steps = steps
        self.position = 0
        self.padded = 0
        """The micro-batches among them that only keep step with other ranks."""
        self.by_hand = plan is not None and not plan.opens_window
        """Whether what it holds was not known when it opened: the caller closes it, or it straddles two loops."""
        self.padding = False
        """Whether the micro-batch that is under way is one of those."""
        self.broken: str | None = None
        """Why this window cannot be used any more, or None."""
        self.weighted: bool | None = None
        """Whether its losses carry weights; None while none came through ``backward`` or ``scale``."""
        self.has_means = False
        """Whether losses without a weight stand beside those with one, which ``weight=fn`` allows."""
        self.planned = plan.real if plan is not None and plan.opens_window else None
        """How many micro-batches that count all ranks had in it when it opened, if that was known."""
        self.rest: Rest | None = None
        """If it was loaded: what is to come, as long as nothing has come."""
        self.count_scale = 1.0 / steps if self.planned is None else ranks / self.planned
        self.scale: float | Tensor = self.count_scale
        self.loss_scale: Tensor | None = None
        """The GradScaler's factor in this window's gradients; the losses here do not hold it."""
        self.terms = 0
        """The losses of the micro-batch that is under way."""
        self._ranks = ranks
        self._counted = None if plan is None else plan.weights
        self._mean_weight = mean_weight
        self._weight: float | Tensor = 0.0
        self._losses: list[Tensor] = []
        self._means: list[Tensor] = []
        self._counted_terms = 0
        self._micro_weight: float | Tensor | None = None
        self._micro_losses: list[Tensor] = []
        self._micro_means: list[Tensor] = []

    @property
    def real(self) -> int:
        """The micro-batches that count."""
        return self.position - self.padded

    @property
    def is_exact(self) -> bool:
        """Whether the scales were right from the start, so that the closed window needs no correction."""
        return not self.by_hand and (self.weighted is False or self._counted is not None)

    def extend(self, plan: Plan) -> None:
        """A window that was open already goes on with these micro-batches."""
        self.by_hand = self.rest is None or not self.rest.is_what_comes(plan)
        self.steps, self.rest = self.position + plan.steps, None

    def state(self) -> dict[str, Any]:
        """What has to be saved of it."""
        values = {name.lstrip("_"): _to_save(getattr(self, name)) for name in self.SAVED}
        return values if self.rest is None else {**values, "by_hand": False}

    @classmethod
    def restored(cls, state: Mapping[str, Any], mean_weight: float | Tensor | None, ranks: int) -> Self:
        """The tally of which ``state`` was saved."""
        tally = cls(state["steps"], mean_weight, None, ranks)
        for name in cls.SAVED:
            setattr(tally, name, _from_saved(name, state[name.lstrip("_")]))
        return tally

    def expect(self, rest: Rest) -> None:
        """A loaded window that was planned: its scales are exact only if ``rest`` is what comes."""
        self.rest, self.by_hand = rest, True

    def term(self, loss: Tensor, weight: float | Tensor | None, reduction: str) -> Tensor:
        """``loss`` scaled as a term of the micro-batch that is under way, which is now tallied."""
        if weight is None and self.weighted is False:  # what most calls are, with the least work
            scaled = loss if self.scale == 1.0 else loss * self.scale
            self.terms += 1
            self._micro_losses.append(scaled.detach())
            return scaled
        self._set_mode(weight)
        self.terms += 1
        if weight is None and self.weighted:
            scaled = scaled_loss(loss, self.count_scale, None, reduction)
            self.has_means = True
            self._micro_means.append(scaled.detach())
            return scaled
        self._micro_weight = weight
        scaled = scaled_loss(loss, self.scale, weight, reduction)
        if not is_zero(weight):
            self._micro_losses.append(scaled.detach())
        return scaled

    def pad(self, loss: Tensor, weight: float | Tensor | None) -> Tensor:
        """``loss`` of a micro-batch that only keeps step with other ranks, made to contribute zero."""
        if self.weighted is None:
            self.begin_terms(weight is not None)
        self.terms += 1
        return scaled_loss(loss, 1.0, 0.0, "mean")

    def _set_mode(self, weight: float | Tensor | None) -> None:
        """Note whether losses carry weights, and refuse what has no common denominator."""
        weighted = weight is not None
        if self.weighted is None:
            self.begin_terms(weighted)
        elif self.weighted != weighted and not (self.weighted and self._counted is not None):
            raise mixed(weight)
        if weighted and self._micro_weight is not None and not _agree(self._micro_weight, weight):
            raise WindowError(
                f"two losses of one micro-batch have the weights {self._micro_weight!r} and {weight!r}; they are terms "
                "of one sum, so give them the same weight, or use one step() block for each."
            )

    def begin_terms(self, weighted: bool) -> None:
        """The window's first loss decides whether its losses carry weights."""
        if self.position:
            raise WindowError(
                f"the first {self.position} blocks of this window ran no backward() or scale(), so how their "
                "gradients were scaled is unknown. Use backward() or scale() in all blocks of a window, or in none."
            )
        self.adopt(weighted)

    def adopt(self, weighted: bool) -> None:
        """Take over the mode that other ranks have, or that the first loss has."""
        self.weighted = weighted or self._counted is not None
        if self._counted is not None:
            self.scale = counted_scale(self._ranks, self._counted.result()[0])
        elif weighted:
            self.scale = window_scale(self.steps, self._mean_weight)

    def totals(self) -> tuple[float | Tensor, float]:
        """The weight and the number of micro-batches so far, the one under way included."""
        count = float(self.real + (self.terms > 0 and not self.padding))
        return (self._weight_with_micro() if self.weighted else count), count

    def _weight_with_micro(self) -> float | Tensor:
        return self._weight if self._micro_weight is None else self._weight + self._micro_weight

    def commit(self, by_hand: bool) -> None:
        """Count the micro-batch that just ended."""
        self.by_hand = self.by_hand or by_hand
        if self._micro_weight is not None:
            self._weight = self._weight_with_micro()
        self._losses += self._micro_losses
        if self._micro_means:
            self._means += self._micro_means
        self._counted_terms += self.terms
        self.position += 1
        self.padded += self.padding
        self._forget()

    def _forget(self) -> None:
        self.terms, self._micro_weight, self._micro_losses, self._micro_means = 0, None, [], []

    def discard(self) -> None:
        """Forget the micro-batch that just failed."""
        self._forget()
        if not self._counted_terms:
            self.weighted, self.scale = None, self.count_scale

    def sums(self, device: torch.device) -> list[tuple[Tensor, float | Tensor]]:
        """The sum of the scaled losses and their scaled weight, for those with the main denominator and the means."""
        weight = self._weight if self.weighted else float(self.real)
        main, means = _sum(self._losses, device), _sum(self._means, device)
        return [(main, self.scale * weight), (means, self.count_scale * self.real if self._means else 0.0)]

    def mean_loss(self, device: torch.device) -> Tensor | None:
        """This rank's weighted mean loss; None if the user scales."""
        if self.weighted is None:
            return None
        main, means = (_ratio(*pair) for pair in self.sums(device))
        return main + means if self._means else main


def _to_save(value: Any) -> Any:
    if isinstance(value, Sum):
        value = value.result()
    if isinstance(value, list):
        return _stacked(value) if value else None
    return value.clone() if isinstance(value, Tensor) else value


def _from_saved(name: str, value: Any) -> Any:
    if name in ("_losses", "_means"):
        return [] if value is None else list(value.unbind())
    return Sum((), value) if name == "_counted" and value is not None else value


def _stacked(losses: list[Tensor]) -> Tensor:
    device = losses[-1].device  # those that were loaded may be elsewhere
    return torch.stack([loss.reshape(()).to(device) for loss in losses])


def _sum(losses: list[Tensor], device: torch.device) -> Tensor:
    return _stacked(losses).sum() if losses else torch.zeros((), device=device)


def _ratio(total: Tensor, weight: float | Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        weight = weight.to(total.device)
        return torch.where(weight > 0, total / weight, torch.zeros_like(weight)).to(total.dtype)
    return total / weight if weight else torch.zeros_like(total)


def _agree(first: float | Tensor | None, second: float | Tensor | None) -> bool:
    """Whether two weights may be one: numbers are compared, tensors are never read."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor)
    return first == second
