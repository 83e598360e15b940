"""The control of the conformance battery: the same table, torch alone, with a loop written by hand.

If this fails, the table or the harness is wrong, not the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.arrangements import ARRANGEMENTS, BY_NAME, Arrangement
from distributed.battery import LR, Watch, clear, expected, expected_local, learning, microbatch, parts, split
from support.oracle import mean_square, same
from support.ranks import Pool

SIZES = (3, 3, 3)


@contextlib.contextmanager
def paused(model: Any) -> Iterator[None]:
    """What people write by hand around the micro-batches that do not close a window."""
    modules: list[Any] = [m for part in parts(model) for m in part.modules()]
    with ExitStack() as stack:
        for module in modules:
            kind = type(module).__name__
            if kind == "DistributedDataParallel" or (kind == "FullyShardedDataParallel" and module is modules[0]):
                stack.enter_context(module.no_sync())
            elif hasattr(type(module), "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(False, recurse=False)
                stack.callback(module.set_requires_gradient_sync, True, recurse=False)
        yield


def by_hand(name: str) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], list[list[int]]]:
    row = BY_NAME[name]
    model = row.build()
    optimizer = torch.optim.SGD(learning(row, model), lr=LR)
    gradients: list[dict[str, Tensor]] = []
    counts: list[list[int]] = []
    for window, size in enumerate(SIZES):
        counts.append([])
        for index in range(size):
            x, y, _ = microbatch(row, dist.get_rank(), window, index, False)
            last = index == size - 1 or (row.first_microbatch_reduced and window == index == 0)
            with contextlib.nullcontext() if last else paused(model):
                counts[-1].append(_one(row, model, x, y, 1 / size))
        gradients.append(row.gradients(model))
        optimizer.step()
        clear(model)
    return gradients, row.parameters(model), counts


def _one(row: Arrangement, model: Any, x: Tensor, y: Tensor, scale: float) -> int:
    with contextlib.nullcontext() if row.compiled else Watch(row) as forward:
        loss = mean_square(row.forward(model, x), y.to(row.dtype)) * scale
    with Watch(row) as backward:
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward
    assert forward is None or not forward.reductions
    return backward.reductions


@pytest.mark.parametrize("name", [row.name for row in ARRANGEMENTS])
def test_a_loop_by_hand_gives_the_oracles_gradient_and_the_counts(name: str, ranks: Callable[[int], Pool]) -> None:
    row = BY_NAME[name]
    for rank, (gradients, parameters, counts) in enumerate(ranks(row.world).run(by_hand, name)):
        references, after = expected(row, rank, SIZES, False)
        for window, (actual, reference) in enumerate(zip(gradients, references, strict=True)):
            reduced, local = split(row, actual)
            same(reduced, split(row, reference)[0], row.tolerance)
            assert counts[window][-1] == row.reductions_of(window + row.first_microbatch_reduced)
            off = counts[window][:-1]
            assert off == ([1, 0] if row.first_microbatch_reduced and window == 0 else [0, 0])
            if local and window == 0:
                same(local, expected_local(row, rank, 0, SIZES[0]))
        same(parameters, after, row.tolerance)
