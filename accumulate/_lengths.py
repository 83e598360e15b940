"""How long a window is, as the user sets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ._arguments import check_steps

__all__ = ["Lengths", "Wanted"]


class Lengths:
    """An int, or a callable of the update index that is asked once for each window."""

    def __init__(self, setting: int | Callable[[int], int]) -> None:
        self.setting = setting
        self._asked: tuple[object, int, int] = (None, 0, 0)

    def of(self, update: int) -> int:
        """The length of the window of that update; raises for a callable's bad answer."""
        if not callable(self.setting):
            return check_steps(self.setting)
        if self._asked[:2] != (self.setting, update):
            self._asked = (self.setting, update, check_steps(self.setting(update)))
        return self._asked[2]

    def wanted(self, update: int, rest: int | None = None) -> Wanted:
        """What the window of that update needs, or the ``rest`` that it still needs."""
        return Wanted(self, self.setting, update, rest)


class Wanted(NamedTuple):
    """How many micro-batches are needed; not asked before there is a batch, for the window may never open."""

    lengths: Lengths
    setting: int | Callable[[int], int]
    update: int
    rest: int | None

    def number(self) -> int:
        return self.lengths.of(self.update) if self.rest is None else self.rest
