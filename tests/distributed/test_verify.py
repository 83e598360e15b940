"""``verify=True`` on real ranks: silent where all is well, and an error on every rank where it is not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accumulate import AccumulateError, Accumulator, WindowError
from distributed.arrangements import BY_NAME, ddp
from support.loops import data, everyone, feed, matches, plain_net, rank
from support.oracle import gradient, same
from support.ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    ["ddp", "ddp-ignored", "ddp-find-unused", "ddp-bf16-hook", "ddp-nested", "fsdp1-full", "fsdp1-no-shard", "fsdp2"],
)
@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
def test_it_is_silent_where_all_is_well(name: str, weighted: bool) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2, verify=True)
    for window in range(3):
        for index in range(2):
            with acc.step():
                output = row.forward(model, data(rank(), 2 * window + index).x.to(row.dtype))
                acc.backward(output.square().mean(), weight=1.0 + rank() if weighted else None)
        assert acc.is_boundary
        model.zero_grad()


@on_ranks(4)
def test_it_is_silent_under_hsdp() -> None:
    row = BY_NAME["hsdp"]
    model = row.build()
    acc = Accumulator(model, 2, verify=True)
    for window in range(2):
        feed(acc, model, [data(rank(), 2 * window + i) for i in range(2)])
        same(row.gradients(model), gradient(row.seed(), everyone(range(2 * window, 2 * window + 2))))
        model.zero_grad()


@on_ranks(4)
def test_copies_of_shards_that_differ_are_named_under_hsdp() -> None:
    row = BY_NAME["hsdp"]
    model = row.build()
    acc = Accumulator(model, 1, verify=True)

    feed(acc, model, [data(rank(), 0)])
    for parameter in model.parameters():
        if rank() == 3 and parameter.grad is not None:
            parameter.grad.mul_(2)
    verifier = acc._windows.verifier
    assert verifier is not None
    expected = pytest.raises(AccumulateError, match="is not the same on all ranks")
    with expected if rank() in (1, 3) else nullcontext():
        verifier.compare()


class Spoilt(nn.Module):
    """A parameter whose reduced gradient is changed on rank 1 alone, by a hook of DDP's own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(x)
        return output


def spoil(state: dict[str, bool], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The average over the ranks; on rank 1 alone a little more, once it is told to."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    factor = 0.5 * (1.001 if state["on"] and rank() == 1 else 1.0)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0].mul(factor))
    return future


@on_ranks(2)
def test_gradients_that_differ_are_an_error_on_every_rank_with_the_parameters_name() -> None:
    model: Any = ddp(Spoilt())
    state = {"on": False}
    model.register_comm_hook(state, lambda state, bucket: spoil(state, bucket))
    acc = Accumulator(model, 2, verify=True)
    feed(acc, model, [data(rank(), i) for i in range(2)])
    model.zero_grad()
    state["on"] = True
    with pytest.raises(
        AccumulateError, match=r"gradient of model\.module\.net\.\S+ is not the same .*rank 0: .*rank 1: "
    ):
        feed(acc, model, [data(rank(), i) for i in (2, 3)])
    assert not acc.is_boundary
    with pytest.raises(WindowError, match=r"reset\(\)"):
        feed(acc, model, [data(rank(), 4)])
    acc.reset()
    state["on"] = False
    feed(acc, model, [data(rank(), i) for i in range(2)])
    assert acc.is_boundary


@on_ranks(2)
def test_ranks_at_different_places_are_both_named_on_both() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 4, verify=True)
    acc.steps = 4 + rank()
    with pytest.raises(WindowError, match=r"rank 0 of 2 has window 0 at micro-batch 4 of 4.*rank 1 has .* 5 of 5"):
        feed(acc, model, [data(rank(), i) for i in range(5)])


@on_ranks(2)
def test_weights_on_one_rank_only_are_found_before_the_boundarys_backward() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2, verify=True)
    with pytest.raises(
        WindowError, match=r"rank 0 of 2 has .*losses without weights.*rank 1 has .*losses with weights"
    ):
        feed(acc, model, [data(rank(), i) for i in range(2)], weighted=rank() == 1)


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_instead_of_waited_for() -> None:
    model = ddp(plain_net(), process_group=dist.new_group())  # what times out is of no use afterwards
    acc = Accumulator(model, 3, verify=2)
    if rank() == 0:
        with pytest.raises(
            WindowError, match=r"within 2 s: rank 0 is at micro-batch 3 of 3 .*, rank 1 is at micro-batch 2"
        ):
            feed(acc, model, [data(rank(), i) for i in range(3)])
    else:
        feed(acc, model, [data(rank(), i) for i in range(2)])


@on_ranks(2)
def test_windows_closed_by_hand_may_be_unequal() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 8, verify=True)
    mine = [data(rank(), i) for i in range(2 + rank())]
    feed(acc, model, mine[:-1])
    feed(acc, model, mine[-1:], boundary=True)
    matches(model, plain_net(), [data(0, 0), data(0, 1), data(1, 0), data(1, 1), data(1, 2)])
