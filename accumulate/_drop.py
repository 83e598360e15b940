"""A micro-batch that must contribute exactly nothing on this rank, while the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._gradients import Gradients, Kept
from ._sync import SyncControl

__all__ = ["Drop"]


class Drop:
    """Replaces a dropped loss by what keeps this rank's collectives equal to the others'."""

    def __init__(self, controls: Sequence[SyncControl], gradients: Sequence[Gradients]) -> None:
        self.is_used = False
        self.skips_backward = False
        """Whether the loss of this micro-batch needs no backward."""
        self._controls = controls
        if any(control.must_run_backward for control in controls):
            for control in controls:  # that backward runs through all of them, so each must be ready to enter zeros
                control.must_run_backward = True
        self._gradients = gradients
        self._aside: list[Kept] = []

    def replace(self, scaled: Tensor, boundary: bool) -> Tensor:
        """What to run backward on: nothing of the loss, or zeros where the others' backward has collectives."""
        self.is_used = True
        several = boundary and len(self._controls) > 1  # which reduce in the order in which backward reaches them
        if several or any(control.must_run_backward for control in self._controls):
            self.begin()
            return scaled
        self.skips_backward = True
        for control in self._controls if boundary else ():
            control.flush()  # in the place of the reduction that this loss's backward makes on the other ranks
        return torch.zeros_like(scaled, requires_grad=True)  # without a graph: its backward reaches no wrapper

    def begin(self) -> None:
        """Let every backward of this micro-batch run, with zeros."""
        self._aside = self._aside or [kept for gradients in self._gradients for kept in gradients.unsteered()]
        self.is_used = True
        for control in self._controls:
            control.drop = True

    def end(self) -> None:
        """The micro-batch is over: put back what a backward with zeros may have spoilt outside the wrappers."""
        for kept in self._aside:
            kept.restore()
        for control in self._controls:
            control.drop = False
        self._aside = []
        self.is_used = self.skips_backward = False
