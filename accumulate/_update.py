"""One update of the parameters for one closed window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from ._amp import Amp
from ._typing import Optimizer, Steppable

__all__ = ["Updates"]


class Updates:
    """Remembers which optimizers have taken the update of which window: none takes one twice."""

    def __init__(self, amp: Amp | None) -> None:
        self._amp = amp
        self._taken: set[tuple[int, int]] = set()
        self.done = 0
        """The update that every optimizer had taken when the state was saved that has been loaded; 0 if none was."""

    def pending(self, optimizers: Sequence[Optimizer], update: int) -> list[Optimizer]:
        """Those of the optimizers that have not taken this update yet; with a scaler, their gradients are unscaled."""
        if update == self.done:
            return []
        pending = [optimizer for optimizer in optimizers if (id(optimizer), update) not in self._taken]
        if pending and self._amp is not None:
            self._amp.unscale(_with_params(pending))
        return pending

    def take(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Steppable], update: int) -> bool:
        """Step everything once and clear the gradients; False if a scaler skips it, and the schedulers then too."""
        self._taken = {each for each in self._taken if each[1] == update}
        stepped = True
        if self._amp is not None:
            stepped = self._amp.step(_with_params(optimizers))
            self._taken |= {(id(optimizer), update) for optimizer in optimizers}
        else:
            self._step_each(optimizers, update)
        try:
            for scheduler in schedulers if stepped else ():
                scheduler.step()
        finally:
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.clear_autocast_cache()  # an outer autocast would go on with casts of the old weights
        return stepped

    def _step_each(self, optimizers: Sequence[Optimizer], update: int) -> None:
        """Step them in order; if one raises, those before it are done and need not be called again."""
        done: list[Optimizer] = []
        try:
            for optimizer in optimizers:
                optimizer.step()
                done.append(optimizer)
                self._taken.add((id(optimizer), update))
        except BaseException:
            for optimizer in done:
                optimizer.zero_grad()  # else the next window would add to gradients that are used up
            raise


def _with_params(optimizers: Sequence[Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers as a scaler needs them."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"a scaler can only step an optimizer that has param_groups, got {optimizer!r}")
    return cast("list[torch.optim.Optimizer]", optimizers)
