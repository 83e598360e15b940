"""Honest counts of collectives: what reached c10d, by kind and size, whoever issued it.

A dispatch mode sees what DDP's C++ reducer sends as well; patching ``torch.distributed.*`` would not. Two
limits, both measured: dynamo does not compile while a dispatch mode is active (count around the backward of a
compiled model only), and the mode sees the calling thread only (on CPU that is where backward runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SCALARS", "Collective", "Collectives"]

SCALARS = 4
"""Sums of weights and counts have at most this many elements; every gradient bucket of the test models has more."""

_REDUCING = ("allreduce", "all_reduce", "reduce_scatter")


class Collective(NamedTuple):
    """One operation: its name without namespace and overload, the elements of its full-sized side, and its ranks."""

    kind: str
    numel: int
    dtype: torch.dtype
    ranks: int = 0
    """The size of the process group, if the operation names one."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_gradient_reduction(self) -> bool:
        """True for a reduction of a gradient bucket: neither a scalar, nor a map of used parameters, nor a buffer."""
        reducing = any(name in self.kind for name in _REDUCING)
        return reducing and self.dtype.is_floating_point and self.numel > SCALARS


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
    """``with Collectives() as seen:`` logs every c10d operation of the block in ``seen.log``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.log: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if "c10d" in func.namespace and "wait" not in func.__name__:
            self.log.append(_describe(func, args))
        run: Callable[..., object] = func
        return run(*args, **(kwargs or {}))

    @property
    def reductions(self) -> list[Collective]:
        """The gradient reductions among them."""
        return [entry for entry in self.log if entry.is_gradient_reduction]

    @property
    def small(self) -> list[Collective]:
        """The collectives of at most ``SCALARS`` elements: sums of weights and counts, and what DDP says about
        buckets.
        """
        return [entry for entry in self.log if entry.numel <= SCALARS]

    @property
    def gathers(self) -> list[Collective]:
        """The all-gathers (of parameters, in FSDP)."""
        return [entry for entry in self.log if "allgather" in entry.kind or "all_gather" in entry.kind]


def _describe(func: torch._ops.OpOverload[..., Any], args: tuple[object, ...]) -> Collective:
    tensors = list(_tensors(args))
    kind = func.__name__.partition(".")[0].strip("_")
    ranks = next((_size(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)), 0)
    if not tensors:
        return Collective(kind, 0, torch.uint8, ranks)
    # _reduce_scatter_base_(output, input, ...) puts in the second, all others the first (or all of a list)
    numel = tensors[1].numel() if kind == "reduce_scatter_base" else sum(t.numel() for t in _tensors(args[:1]))
    return Collective(kind, numel, tensors[0].dtype, ranks)


def _is_group(boxed: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(boxed._type())


def _size(boxed: torch.ScriptObject) -> int:
    return dist.ProcessGroup.unbox(boxed).size()


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
