"""One update of the parameters for one closed window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._typing import Optimizer, Steppable

__all__ = ["Updates"]


class Updates:
    """Remembers which optimizers have taken the update of which window: none takes one twice."""

    def __init__(self) -> None:
        self._taken: set[tuple[int, int]] = set()
        self.done = 0
        """The update that every optimizer had taken when the state was saved that has been loaded; 0 if none was."""

    def pending(self, optimizers: Sequence[Optimizer], update: int) -> list[Optimizer]:
        """Those of the optimizers that have not taken this update yet."""
        if update == self.done:
            return []
        return [optimizer for optimizer in optimizers if (id(optimizer), update) not in self._taken]

    def take(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Steppable], update: int) -> None:
        """Step everything once, and clear the gradients."""
        self._taken = {each for each in self._taken if each[1] == update} | {(id(o), update) for o in optimizers}
        for each in (*optimizers, *schedulers):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.clear_autocast_cache()  # an outer autocast would go on with casts of the old weights
