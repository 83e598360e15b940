"""A wrapper that comes after the accumulator, and ranks that differ, on real ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

import accumulate._arguments as module
from accumulate import AccumulateError, Accumulator
from distributed.arrangements import ddp
from support.loops import data, feed, loss_of, plain_net, rank
from support.ranks import on_ranks


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return cast("nn.Module", fully_shard(model))


@on_ranks(2)
@pytest.mark.parametrize("where", ["around", "around, forward before the block", "inside", "fully_shard", "fsdp1"])
def test_a_wrapper_that_comes_after_the_accumulator_is_an_error(where: str) -> None:
    model: Any = plain_net()
    with pytest.warns(UserWarning, match="no wrapper"):
        acc = Accumulator(model, 2)
    if where == "inside":
        model[0] = ddp(model[0])
    elif where == "fully_shard":
        sharded(model)
    elif where == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        model = ddp(model)
    with pytest.raises(AccumulateError, match=r"when the Accumulator was|runs inside a DistributedDataParallel"):
        if where == "around, forward before the block":
            for index in range(2):
                loss = loss_of(model, data(rank(), index))
                with acc.step():
                    acc.backward(loss)
        else:
            feed(acc, model, [data(rank(), 0)])


@on_ranks(2)
def test_case_29_plain_parts_beside_a_wrapped_one_run_as_ever() -> None:
    model = nn.Sequential(ddp(plain_net(1)), plain_net(2))
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), i) for i in range(2)])
    assert acc.is_boundary


@on_ranks(2)
def test_the_library_and_torch_are_compared_at_construction() -> None:
    versions = vars(module)["__version__"]
    vars(module)["__version__"] = f"{versions}+{rank()}"
    try:
        with pytest.raises(AccumulateError, match=r"ranks disagree on versions: rank 0 has .*\+0.*rank 1 has .*\+1"):
            Accumulator(ddp(plain_net()), 2)
    finally:
        vars(module)["__version__"] = versions
