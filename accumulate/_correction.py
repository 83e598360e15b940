"""Making a closed window exact: the sum of its weights over the ranks, and one multiply of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._errors import AccumulateError
from ._gradients import Gradients
from ._ranks import Ranks, Sum
from ._scaling import correction
from ._tally import Tally

__all__ = ["Correction"]


class Correction:
    """Multiplies gradients by R / (scale * sum of weights), unless that is known to be 1 or the user scales."""

    def __init__(self, ranks: Ranks, gradients: Sequence[Gradients], mean_weight: float | None = None) -> None:
        self.mean_weight: float | Tensor | None = mean_weight
        """The mean weight of a micro-batch in the last weighted window, over all ranks; before it, a guess or None."""
        self._ranks = ranks
        self._gradients = gradients
        self._sum: Sum | None = None

    def start(self, tally: Tally) -> None:
        """Begin to sum the window's weights, if they have to be known: before backward, to overlap with it."""
        if self._sum is None:
            self._sum = self._ranks.start_sum(tally.totals())

    def forget(self) -> None:
        """Drop the sum of a micro-batch that failed."""
        self._sum = None

    def agree(self, tally: Tally) -> bool:
        """Sum what any rank has open, for a flush; False if none has anything. Reads one vector on the host."""
        mode = (float(tally.weighted is True), float(tally.weighted is False))
        sums = self._ranks.start_sum((*tally.totals(), *mode))
        _, count, weighted, unweighted = sums.result().tolist()
        if weighted and unweighted:
            raise AccumulateError(
                "some ranks gave their losses a weight in this window and some did not, so it has no common "
                "denominator. Pass a weight on every rank; reset() drops this window."
            )
        if tally.weighted is None and (weighted or unweighted):
            tally.begin_terms(bool(weighted))  # this rank had no micro-batch of a window that others have opened
        self._sum = sums if count else None
        return bool(count)

    def apply(self, tally: Tally) -> None:
        """Correct the gradients of a window that has been reduced."""
        if tally.weighted is None or not (tally.weighted or tally.by_hand):
            return
        self.start(tally)
        assert self._sum is not None  # just started, if it was not under way
        total, count = self._sum.result()[:2]
        self._sum = None
        for gradients in self._gradients:
            if gradients.is_wrapped or self._ranks.chosen:
                gradients.multiply(correction(self._ranks.size, tally.scale, total))
            else:
                local = self._ranks.start_sum(tally.totals(), local=True).result()[0]
                gradients.multiply(correction(1, tally.scale, local))
        if tally.weighted:
            previous = 1.0 if self.mean_weight is None else self.mean_weight
            self.mean_weight = torch.where(total > 0, total / count, previous)
