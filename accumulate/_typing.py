"""The shapes of what users pass: anything with these methods will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict

from torch import Tensor

__all__ = ["BackwardOptions", "Optimizer", "Removable", "Steppable"]


class Steppable(Protocol):
    """A learning-rate scheduler, or whatever else advances once per update."""

    def step(self) -> object: ...


class Removable(Protocol):
    """A hook, or whatever else has to be undone when the library leaves a module."""

    def remove(self) -> object: ...


class Optimizer(Steppable, Protocol):
    """An optimizer, or a wrapper around one."""

    def zero_grad(self) -> object: ...


class BackwardOptions(TypedDict, total=False):
    """The further arguments of ``Tensor.backward``."""

    retain_graph: bool | None
    create_graph: bool
    inputs: Sequence[Tensor]
