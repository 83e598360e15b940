"""The ``with`` blocks: one micro-batch of an accumulator, and ``no_sync`` without one."""

from __future__ import annotations

from torch import nn

from ._arguments import as_models
from ._errors import WindowError
from ._sync import Found, begin, find, release
from ._windows import Windows

__all__ = ["Block", "no_sync"]


class Block:
    """The context of one micro-batch; a class, because a generator-based one costs ten times as much to enter."""

    __slots__ = ("_boundary", "_windows")

    def __init__(self, windows: Windows, boundary: bool | None) -> None:
        self._windows = windows
        self._boundary = boundary

    def __enter__(self) -> None:
        self._windows.enter(self._boundary)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._windows.leave(failed=kind is not None)


class no_sync:  # noqa: N801 - a context manager that reads as a verb, like torch.no_grad
    """Inside ``with no_sync(model):`` gradients accumulate locally, under any wrapper; on a plain module
    nothing happens.

    Whether to reduce is decided when backward runs, so a forward inside reduces if its backward comes after
    the block. Only under DDP without an attached ``Accumulator``, a forward that ran before the block reduces
    inside it (torch decides that in forward): the gradient stays right, the communication is not saved.
    Unknown wrappers raise :class:`UnsupportedWrapperError`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._models = as_models(model)
        self._found: list[Found] = []

    def __enter__(self) -> None:
        if self._found:
            raise WindowError("this no_sync(model) is entered already; call no_sync(model) again for a nested block")
        found = find(self._models)
        self._policies = [control.policy for _, control in found]
        try:
            for _, control in found:
                control.policy = "balanced"  # under "memory" every backward reduces
            begin([control for _, control in found], reduce=False)
        except BaseException:
            release(found)
            raise
        self._found = found

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        found, self._found = self._found, []
        for (_, control), policy in zip(reversed(found), reversed(self._policies), strict=True):
            control.end()
            control.policy = policy
        release(found)
