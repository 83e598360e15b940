"""Counts what a process hands to collectives, below every wrapper: DDP's reducer and FSDP alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process handed to collectives, and how many reductions there were.

    ``reduced``: inputs of all-reduces and reduce-scatters. ``gathered``: outputs of all-gathers. What crosses
    the wire depends on the backend's algorithm; the payload does not.
    """

    reduced: int = 0
    gathered: int = 0
    reductions: int = 0


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Active as a ``with`` block; ``traffic`` is what was seen in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.traffic = Traffic()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(str(func), args)
        call: Callable[..., object] = func
        return call(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[object]) -> None:
        # The full-sized side is the larger argument: a reduce-scatter's input, an all-gather's output.
        payload = max((_size(argument) for argument in args), default=0)
        seen = self.traffic
        if "gather" in name:
            self.traffic = Traffic(seen.reduced, seen.gathered + payload, seen.reductions)
        elif "reduce" in name:
            self.traffic = Traffic(seen.reduced + payload, seen.gathered, seen.reductions + 1)


def _size(argument: object) -> int:
    leaves = tree_leaves(argument)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
