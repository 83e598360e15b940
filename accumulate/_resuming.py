"""What a wrapper has to do with a window that is saved half done and loaded in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["Resuming"]


class Resuming(ABC):
    """For wrappers that keep the sums of an open window whole in ``.grad`` of each rank, and nowhere else."""

    @abstractmethod
    def order(self) -> list[int]:
        """How its reductions add up, as numbers that can be saved; empty if every process does so alike."""

    @abstractmethod
    def can_restore(self, order: Sequence[int]) -> bool:
        """Whether ``restore`` would change something and would work. Every rank is asked before one is told to."""

    @abstractmethod
    def restore(self, order: Sequence[int]) -> None:
        """Add up in that order from now on. A collective; gradients are as before when it returns."""

    @abstractmethod
    def loaded(self) -> None:
        """The sums of an open window have been put into ``.grad``: go on as in the middle of a window."""
