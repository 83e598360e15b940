"""One process stands for a rank of up to 16,384: how often it would communicate, and what our bookkeeping does for it.

torch's fake process group answers every collective at once, and wrongly: only counts are looked at, no gradient.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

import accumulate
from accumulate import Accumulator
from distributed.arrangements import Net, fsdp1, fsdp2
from support.counting import Collectives

SIZES = (2, 64, 1024, 16384)
STEPS = 4
HOME = str(Path(accumulate.__file__).parent)


@contextmanager
def simulated(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp(model: nn.Module) -> nn.Module:
    """torch 2.13: the fake group's futures hold None, where DDP's reduction asserts; a hook's can hold the bucket."""
    from torch.nn.parallel import DistributedDataParallel

    def reduce(state: None, bucket: Any) -> Any:
        dist.all_reduce(bucket.buffer())
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=0.001)
    wrapped.register_comm_hook(None, lambda state, bucket: reduce(state, bucket))
    return cast("nn.Module", wrapped)


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp2(model, mesh=(dist.get_world_size() // 2, 2))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "fsdp1": lambda model: fsdp1(model, "FULL_SHARD", False),
    "fsdp2": fsdp2,
    "hsdp": hsdp,
}


class Calls:
    """``with Calls() as calls:`` counts in ``calls.seen`` the calls of this library's own functions, by name."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            self.seen[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1


def windows(acc: Accumulator, model: nn.Module, weight: int | None, count: int) -> None:
    for _ in range(count * STEPS):
        with acc.step():
            acc.backward(model(torch.ones(2, 8)).mean(), weight)
    model.zero_grad()


def observed(wrapper: str, ranks: int, weight: int | None) -> tuple[Counter[str], Counter[str]]:
    """Collectives by kind, and our own calls by name, of one window in a rank of ``ranks``."""
    with simulated(ranks):
        model = WRAPPERS[wrapper](Net())
        with Accumulator(model, STEPS) as acc:
            windows(acc, model, weight, 2)  # DDP rebuilds its buckets, FSDP initialises itself
            with cast("Any", Collectives()) as sent:
                windows(acc, model, weight, 1)
            with Calls() as calls:
                windows(acc, model, weight, 1)
    return Counter(entry.kind for entry in sent.log), calls.seen


EXPECTED: dict[str, dict[str, int]] = {
    "ddp": {"allreduce": 2},  # two buckets
    "fsdp1": {"allgather": (3 + 2) * STEPS, "reduce_scatter_base": 3},
    "fsdp2": {"allgather_base": 3 + 2 * STEPS, "reduce_scatter_base": 3},
    "hsdp": {"allgather_base": 3 + 2 * STEPS, "reduce_scatter_base": 3, "allreduce": 3},
}
"""For three units: each forward or backward gathers the units that were resharded before it."""
SUMS = {"ddp": 1, "fsdp1": 1, "fsdp2": 1, "hsdp": 2}
"""What weights add: one all-reduce of their sum, in each dimension of the mesh."""


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("weight", [None, 3])
def test_a_rank_of_16384_communicates_as_often_as_one_of_two(wrapper: str, weight: int | None) -> None:
    few, *more = [observed(wrapper, ranks, weight) for ranks in SIZES]
    assert few[0] == Counter(EXPECTED[wrapper]) + Counter({"allreduce": SUMS[wrapper] if weight else 0})
    assert few[1]["_windows.leave"] == STEPS  # it was counted
    for many in more:
        assert many == few
