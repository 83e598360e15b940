"""What the conformance battery and its control have in common: data, parameters that learn, and what must come out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from distributed.arrangements import HOOK_CALLS, Arrangement, tensor_of
from support.counting import Collectives
from support.oracle import Term, gradient, train

__all__ = [
    "LR",
    "Watch",
    "clear",
    "expected",
    "expected_local",
    "learning",
    "microbatch",
    "next_gradient",
    "split",
    "terms",
]

LR = 0.1


def microbatch(row: Arrangement, rank: int, window: int, index: int, weighted: bool) -> Term:
    """One micro-batch: ragged unless the model is compiled; the weights differ and so do the ranks' totals."""
    draw = torch.Generator().manual_seed(10_000 * rank + 100 * window + index)
    n = 4 if row.compiled else 2 + (3 * rank + 2 * window + index) % 4
    x = torch.randn(n, 8, dtype=torch.float64, generator=draw)
    if rank == index % 2:
        x[0, 0] = x[0, 0].abs()  # Branching: whether a head is used depends on rank and micro-batch
    y = torch.randn(n, 8, dtype=torch.float64, generator=draw)
    return Term(x, y, float(1 + (5 * rank + 3 * window + 2 * index) % 6) if weighted else 1.0)


def terms(row: Arrangement, ranks: list[int], window: int, size: int, weighted: bool) -> list[Term]:
    """All micro-batches of a window on those ranks."""
    return [microbatch(row, rank, window, index, weighted) for rank in ranks for index in range(size)]


def _forward(model: nn.Module, x: Tensor) -> Tensor:
    return tensor_of(model(x))


def expected(
    row: Arrangement, rank: int, sizes: tuple[int, ...], weighted: bool
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The oracle's gradient of each window, and its parameters after the last."""
    windows = [terms(row, row.peers(rank), w, size, weighted) for w, size in enumerate(sizes)]
    return train(row.seed(), windows, LR, _forward, keep=row.local)


def expected_local(row: Arrangement, rank: int, window: int, size: int) -> dict[str, Tensor]:
    """What one rank alone has after the first window, for parameters that no wrapper reduces."""
    found = gradient(row.seed(), terms(row, [rank], window, size, False), _forward)
    return {name: value for name, value in found.items() if row.is_local(name)}


def next_gradient(row: Arrangement, rank: int, parameters: dict[str, Tensor], window: int) -> dict[str, Tensor]:
    """The gradient of one ordinary, synchronised micro-batch of a model that has these parameters."""
    model = row.seed()
    model.load_state_dict(parameters, strict=False)
    return gradient(model, terms(row, row.peers(rank), window, 1, False), _forward)


def split(row: Arrangement, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the wrappers reduce, and what stays local."""
    local = {name: value for name, value in values.items() if row.is_local(name)}
    return {name: value for name, value in values.items() if name not in local}, local


def learning(row: Arrangement, model: Any) -> list[nn.Parameter]:
    """What the optimizer gets: everything that learns and is reduced."""
    local = {id(p) for name, p in row.named(model) if row.is_local(name)}
    return [p for part in parts(model) for p in part.parameters() if p.requires_grad and id(p) not in local]


class Watch:
    """``with Watch(row) as seen:`` counts gradient reductions in ``seen.reductions``, and sums of weights in
    ``seen.small``.
    """

    def __init__(self, row: Arrangement) -> None:
        self._row = row
        self._mode: Any = Collectives()
        self._calls = 0

    def __enter__(self) -> Self:
        self._before = len(HOOK_CALLS)
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._mode.__exit__(kind, error, trace)
        self._calls += len(HOOK_CALLS) - self._before

    @property
    def reductions(self) -> int:
        return self._calls if self._row.counts_hook else len(self._mode.reductions)

    @property
    def small(self) -> int:
        return len([one for one in self._mode.small if "allreduce" in one.kind and one.dtype.is_floating_point])


def clear(model: Any) -> None:
    """Forget every gradient."""
    for part in parts(model):
        part.zero_grad()


def parts(model: Any) -> list[nn.Module]:
    """The models of a list, or the one model."""
    return model if isinstance(model, list) else [model]
