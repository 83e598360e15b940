"""``scaler=`` on ranks: the oracle's update under every wrapper, and what one rank finds infinite skips all of them."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from accumulate import AccumulateError, Accumulator
from distributed.arrangements import BY_NAME, Arrangement, ddp
from distributed.battery import learning
from support.counting import Collectives
from support.loops import data, equal_on_ranks, everyone, feed, plain_net, rank
from support.oracle import Term, gradient, mean_square, same
from support.ranks import on_ranks

FACTOR = 1024.0
LR = 0.1
INF = float("inf")


def scaler_of(kind: str, **options: Any) -> GradScaler:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    kinds: dict[str, type[GradScaler]] = {"": GradScaler, "Sharded": ShardedGradScaler}
    return kinds[kind]("cpu", init_scale=FACTOR, **options)


def step_of_sgd(model: nn.Module, terms: list[Term], max_norm: float) -> tuple[float, dict[str, Tensor]]:
    """The oracle's norm, and its parameters after one clipped update."""
    found = gradient(model, terms)
    norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in found.values()])))
    factor = LR * min(1.0, max_norm / norm)
    return norm, {name: p.detach() - factor * found[name] for name, p in model.named_parameters()}


ROWS = [
    ("ddp", ""),
    ("ddp", "Sharded"),
    ("fsdp1-full", ""),
    ("fsdp1-full", "Sharded"),
    ("fsdp1-grad-op-orig", "Sharded"),
    ("fsdp1-no-shard", ""),
    ("fsdp2", ""),
    ("fsdp2-children", ""),
    ("replicate", ""),
]


@on_ranks(2)
@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_case_37_infinite_on_one_rank_in_the_second_micro_batch_skips_every_rank(name: str, kind: str) -> None:
    skip_then_step(BY_NAME[name], kind)


@on_ranks(4)
def test_case_37_infinite_on_one_rank_of_two_meshes() -> None:
    skip_then_step(BY_NAME["hsdp"], "")


def skip_then_step(row: Arrangement, kind: str) -> None:
    """Two windows of four weighted micro-batches: the first is infinite in one of them, the second is an update."""
    model, scaler = row.build(), scaler_of(kind)
    acc, optimizer = Accumulator(model, 4, scaler=scaler), torch.optim.SGD(learning(row, model), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    taken = []
    for index in range(8):
        x, y, _ = data(rank(), index)
        with acc.step():
            loss = mean_square(row.forward(model, x), y)
            bad = index == 1 and rank() == dist.get_world_size() - 1
            acc.backward(loss * INF if bad else loss, weight=float(1 + rank() + index % 3))
        taken.append(acc.optimizer_step(optimizer, max_norm=0.05, schedulers=[scheduler]))
        if index == 3:
            same(row.parameters(model), dict(row.seed().named_parameters()), 0.0)
    assert taken == [False] * 7 + [True]
    assert (acc.updates, scheduler.last_epoch, scaler.get_scale()) == (2, 1, FACTOR / 2)
    terms = [Term(*data(r, i)[:2], float(1 + r + i % 3)) for r in range(row.world) for i in range(4, 8)]
    norm, expected = step_of_sgd(row.seed(), terms, 0.05)
    same(row.parameters(model), expected, 1e-6)  # torch's clipping adds 1e-6 to the norm
    assert norm > 0.05
    assert float(cast("Tensor", acc.grad_norm)) == pytest.approx(norm)


class Diagonal(nn.Module):
    """The gradient of its weight is its input, element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def wrapped(wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return ddp(Diagonal())
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return cast("nn.Module", fully_shard(Diagonal()))
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu")
    return FullyShardedDataParallel(Diagonal(), device_id=device, use_orig_params=wrapper == "fsdp1-orig")


def window_with_one_infinite_element(acc: Accumulator, model: nn.Module) -> None:
    """The gradient is infinite in the first shard only, and because of rank 1."""
    for index in range(2):
        x = torch.ones(16)
        if index == 0 and rank() == 1:
            x[0] = INF
        with acc.step():
            acc.backward(model(x).sum())


BOTH = [
    # ShardedGradScaler is for FSDP1; with DTensors torch warns of the shape of what it finds.
    *product(["ddp", "fsdp1", "fsdp1-orig"], ["", "Sharded"], [False, True]),
    *product(["fsdp2"], [""], [False, True]),
]


@on_ranks(2)
@pytest.mark.parametrize(("wrapper", "kind", "fused"), BOTH)
def test_what_is_infinite_in_one_shard_skips_every_rank(wrapper: str, kind: str, fused: bool) -> None:
    model, scaler = wrapped(wrapper), scaler_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    acc = Accumulator(model, 2, scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    window_with_one_infinite_element(acc, model)
    assert not acc.optimizer_step(optimizer)
    assert scaler.get_scale() == FACTOR / 2
    for p, value in zip(model.parameters(), before, strict=True):
        assert bool((p == value).all())


@on_ranks(2)
@pytest.mark.parametrize(("wrapper", "kind", "fused"), [row for row in BOTH if row[1:] != ("Sharded", True)])
def test_the_users_own_update_skips_every_rank_too(wrapper: str, kind: str, fused: bool) -> None:
    model, scaler = wrapped(wrapper), scaler_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    acc = Accumulator(model, 2, scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    window_with_one_infinite_element(acc, model)
    acc.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == FACTOR / 2
    for p, value in zip(model.parameters(), before, strict=True):
        assert bool((p == value).all())


@on_ranks(2)
@pytest.mark.parametrize("several_optimizers", [False, True])
def test_what_is_infinite_in_a_part_without_a_wrapper_skips_every_rank(several_optimizers: bool) -> None:
    body, head = ddp(plain_net(1)), plain_net(2)
    model, scaler = [body, head], scaler_of("")
    acc = Accumulator(model, 2, group=dist.group.WORLD, scaler=scaler)
    parts = [[*body.parameters()], [*head.parameters()]]
    optimizers = [torch.optim.SGD(p, lr=LR) for p in (parts if several_optimizers else [parts[0] + parts[1]])]
    before = {name: p.detach().clone() for name, p in body.named_parameters()}
    for index in range(2):
        x, y, _ = data(rank(), index)
        with acc.step():
            bad = INF if rank() == 1 and index == 0 else 1.0
            acc.backward(mean_square(body(x), y) + mean_square(head(x), y) * bad)
    assert all(bool(torch.isfinite(p.grad).all()) for p in body.parameters() if p.grad is not None)
    assert not acc.optimizer_step(*optimizers)
    same(dict(body.named_parameters()), before, 0.0)
    assert scaler.get_scale() == FACTOR / 2


@on_ranks(2)
def test_agreeing_is_one_small_collective_for_each_optimizer() -> None:
    model, scaler = ddp(plain_net()), scaler_of("")
    acc, optimizer = Accumulator(model, 2, scaler=scaler), torch.optim.SGD(model.parameters(), lr=LR)
    with Collectives() as seen:
        feed(acc, model, [data(rank(), index) for index in range(2)])
        assert acc.optimizer_step(optimizer)
    assert len(seen.reductions) == 1
    assert [entry.numel for entry in seen.small if entry.dtype == torch.float64] == [1]


@on_ranks(2)
def test_case_52_one_scaler_for_generator_and_discriminator() -> None:
    gen, disc = ddp(plain_net(1)), ddp(plain_net(2))
    scaler = scaler_of("", growth_interval=1)  # each update doubles the factor
    accs = Accumulator(gen, 2, scaler=scaler), Accumulator(disc, 4, scaler=scaler)
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in (gen, disc)]
    expected = [plain_net(1), plain_net(2)]
    for index in range(8):
        for acc, model in zip(accs, (gen, disc), strict=True):
            feed(acc, model, [data(rank(), index)])
        for acc, optimizer, reference in zip(accs, optimizers, expected, strict=True):
            if acc.is_boundary:
                terms = everyone(range(index + 1 - cast("int", acc.steps), index + 1))
                _, after = step_of_sgd(reference, terms, 0.05)
                reference.load_state_dict(after)
            assert acc.optimizer_step(optimizer, max_norm=0.05) == acc.is_boundary
    for model, reference in zip((gen, disc), expected, strict=True):
        found = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
        same(found, dict(reference.named_parameters()), 1e-6)
        equal_on_ranks(found)
    assert scaler.get_scale() == FACTOR * 2**6


@on_ranks(2)
def test_a_rank_without_any_micro_batch_learns_the_factor_of_a_flushed_window() -> None:
    model, other = ddp(plain_net(1)), plain_net(2)
    scaler = scaler_of("", growth_interval=1)
    acc, second = Accumulator(model, 2, scaler=scaler), Accumulator(other, 1, group=dist.group.WORLD, scaler=scaler)
    optimizers = [torch.optim.SGD(each.parameters(), lr=LR) for each in (model, other)]
    feed(acc, model, [data(rank(), index) for index in range(2)])  # DDP builds its buckets
    assert acc.optimizer_step(optimizers[0])
    before = {name: p.detach().clone() for name, p in cast("Any", model).module.named_parameters()}
    reference = gradient(cast("Any", model).module, [data(0, 5)])
    if rank() == 0:
        feed(acc, model, [data(0, 5)])
    feed(second, other, [data(0, 0)])
    assert second.optimizer_step(optimizers[1])  # doubles the factor while rank 0 has a window open
    assert acc.flush()
    assert acc.optimizer_step(optimizers[0])
    found = dict(cast("Any", model).module.named_parameters())
    same(found, {name: value - LR * reference[name] for name, value in before.items()})
    equal_on_ranks({name: p.detach() for name, p in found.items()})


@on_ranks(2)
@pytest.mark.parametrize("other", [None, "", "Sharded"])
def test_ranks_with_different_scalers_are_an_error_on_both(other: str | None) -> None:
    theirs = None if other is None else scaler_of(other)
    if other == "":
        theirs = GradScaler("cpu", init_scale=2 * FACTOR)
    with pytest.raises(AccumulateError, match=r"disagree on scaler: rank 0 has 'GradScaler at 1024"):
        Accumulator(ddp(plain_net()), 2, scaler=scaler_of("") if rank() == 0 else theirs)
