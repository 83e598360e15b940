"""``python -m accumulate plan`` against real ranks: the bytes it predicts are the bytes that are counted.

One row for each wrapper and policy. Where the library has a policy, its own loop is counted; the other rows are counted
on a loop of torch's own setters, which says what the policy means. To move a row to the library, set ``by="library"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from accumulate import Accumulator
from accumulate.plan.cost import Cluster, Job, forecast
from accumulate.plan.volume import EACH, Model, Volume, held
from distributed.arrangements import Net, ddp, fsdp1, fsdp2
from support.counting import Collective, Collectives
from support.ranks import on_ranks

MIXED = {"gathered": 2, "reduced": 4}


@dataclass(frozen=True)
class Row:
    """A wrapper under a policy, and whose loop is counted."""

    wrapper: str
    policy: str
    world: int = 2
    by: str = "torch"
    """"library": an ``Accumulator`` with that policy; "torch": flags set by hand."""
    wrap: Callable[[nn.Module], nn.Module] = fsdp2
    shards: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """What the plan has to know beyond sizes: ``reshard``, widths of dtypes."""
    about: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.wrapper, self.policy, str(self.world), self.about)))

    def job(self) -> Job:
        size, root = (sum(p.numel() for p in part.parameters()) for part in (Net(), Net().head))
        model = Model(size, root, layers=2, **dict(self.options))
        shards = 1 if self.wrapper == "ddp" else self.shards or self.world
        return Job(model, self.wrapper, Cluster(1, self.world, within=1e9, between=1e9), 1.0, shards)


def sharded(model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    return fsdp1(model, strategy, False, **options)


def mixed_fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecision

    return sharded(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def mixed(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), **options)


kept: Any = partial(fsdp2, reshard_after_forward=False)
hybrid: Any = partial(fsdp2, mesh=(2, 2))
KEPT, WIDE = (("reshard", False),), tuple(MIXED.items())

ROWS = (
    Row("ddp", "balanced", by="library", wrap=ddp),
    Row("ddp", "balanced", 4, by="library", wrap=ddp),
    Row("ddp", EACH, wrap=ddp),
    Row("fsdp1", "balanced", by="library", wrap=sharded),
    Row("fsdp1", "balanced", 4, by="library", wrap=sharded),
    Row("fsdp1", "balanced", by="library", wrap=partial(sharded, strategy="SHARD_GRAD_OP"), options=KEPT, about="kept"),
    Row("fsdp1", "balanced", by="library", wrap=mixed_fsdp1, options=WIDE, about="mixed"),
    Row("fsdp1", "memory", wrap=sharded),
    Row("fsdp1", "memory", wrap=partial(sharded, strategy="SHARD_GRAD_OP"), options=KEPT, about="kept"),
    Row("fsdp1", "memory", wrap=mixed_fsdp1, options=WIDE, about="mixed"),
    Row("fsdp1", "speed", wrap=sharded, about="as balanced"),
    Row("fsdp1", EACH, wrap=sharded),
    Row("fsdp2", "balanced", by="library"),
    Row("fsdp2", "balanced", 4, by="library"),
    Row("fsdp2", "balanced", by="library", wrap=kept, options=KEPT, about="kept"),
    Row("fsdp2", "balanced", by="library", wrap=mixed, options=WIDE, about="mixed"),
    Row("fsdp2", "balanced", about="by hand"),
    Row("fsdp2", "memory"),
    Row("fsdp2", "memory", 4),
    Row("fsdp2", "memory", wrap=kept, options=KEPT, about="kept"),
    Row("fsdp2", "memory", wrap=mixed, options=WIDE, about="mixed"),
    Row("fsdp2", "speed"),
    Row("fsdp2", "speed", 4),
    Row("fsdp2", "speed", wrap=kept, options=KEPT, about="kept"),
    Row("fsdp2", "speed", wrap=mixed, options=WIDE, about="mixed"),
    Row("fsdp2", EACH),
    Row("hsdp", "balanced", 4, by="library", wrap=hybrid, shards=2),
    Row("hsdp", "balanced", 4, by="library", wrap=partial(mixed, mesh=(2, 2)), shards=2, options=WIDE, about="mixed"),
    Row("hsdp", "memory", 4, wrap=hybrid, shards=2),
    Row("hsdp", "memory", 4, wrap=partial(mixed, mesh=(2, 2)), shards=2, options=WIDE, about="mixed"),
    Row("hsdp", "speed", 4, wrap=hybrid, shards=2),
    Row("hsdp", EACH, 4, wrap=hybrid, shards=2),
)
BY_NAME = {row.name: row for row in ROWS}


def names(world: int) -> list[str]:
    return [row.name for row in ROWS if row.world == world]


# -- loops ------------------------------------------------------------------------------------------------------------


def batch() -> Tensor:
    return torch.randn(3, 8)


@contextmanager
def library(row: Row, model: Any, steps: int) -> Iterator[Callable[[int], None]]:
    with Accumulator(model, steps, policy=row.policy) as acc:

        def microbatch(index: int) -> None:
            with acc.step():
                acc.backward(model(batch()).mean())

        yield microbatch


@contextmanager
def torchs(row: Row, model: Any, steps: int) -> Iterator[Callable[[int], None]]:
    """The same window with the setters that torch has for it."""

    def microbatch(index: int) -> None:
        last = index == steps - 1
        if row.wrapper in ("fsdp2", "hsdp"):
            flag(row.policy, row.wrapper, model, last)
        defers = row.wrapper == "fsdp1" and row.policy in ("balanced", "speed") and not last
        with model.no_sync() if defers else nullcontext():
            model(batch()).mean().backward()

    yield microbatch


def flag(policy: str, wrapper: str, model: Any, last: bool) -> None:
    """FSDP2's setters for a micro-batch; all of them act on the whole tree."""
    if policy in ("balanced", "speed"):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
    if policy == "speed":
        model.set_reshard_after_forward(False)
    if policy == "memory" and wrapper == "hsdp":
        model.set_requires_all_reduce(last)


LOOPS = {"library": library, "torch": torchs}


def window(row: Row, model: Any, steps: int, after: Callable[[], None] = lambda: None) -> list[Collective]:
    """What one window sends; gradients are dropped afterwards, as an optimizer's loop would."""
    collectives: Any = Collectives()
    with LOOPS[row.by](row, model, steps) as microbatch, collectives as seen:
        for index in range(steps):
            microbatch(index)
            after()
    model.zero_grad()
    return cast("list[Collective]", seen.log)


# -- what was counted -------------------------------------------------------------------------------------------------

KINDS = {
    "all_gather": {"allgather_base", "allgather"},  # gloo gathers FSDP1's parameters by the second
    "reduce_scatter": {"reduce_scatter_base"},
    "all_reduce": {"allreduce"},
}
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def counted(log: Sequence[Collective]) -> tuple[Volume, Volume]:
    """Payload, and what rings send of it: the latter from the size of each collective's own group."""
    known = set[str]().union(*KINDS.values())
    assert {entry.kind for entry in log} <= known, "a collective that the plan does not know"
    payload, sent = {}, {}
    for name, kinds in KINDS.items():
        found = [entry for entry in log if entry.kind in kinds]
        payload[name] = float(sum(entry.nbytes for entry in found))
        sent[name] = sum(PASSES[name] * entry.nbytes * (entry.ranks - 1) / entry.ranks for entry in found)
    return Volume(**payload), Volume(**sent)


def check_bytes(row: Row, steps: int) -> None:
    model = row.wrap(Net())
    for _ in range(2):  # FSDP initialises itself in its first forward, DDP rebuilds its buckets before its second
        window(row, model, 1)
    predicted = forecast(row.job(), row.policy, steps)
    payload, sent = counted(window(row, model, steps))
    assert payload == predicted.payload
    assert sent == predicted.sent
    assert sum(sent) > 0


@pytest.mark.parametrize("name", names(2))
@pytest.mark.parametrize("steps", [1, 3])
@on_ranks(2)
def test_two_ranks_send_what_the_plan_predicts(name: str, steps: int) -> None:
    check_bytes(BY_NAME[name], steps)


@pytest.mark.parametrize("name", names(4))
@pytest.mark.parametrize("steps", [1, 3])
@on_ranks(4)
def test_four_ranks_send_what_the_plan_predicts(name: str, steps: int) -> None:
    check_bytes(BY_NAME[name], steps)


# -- what was held ----------------------------------------------------------------------------------------------------


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Of the storages, which FSDP empties when it reshards; a DTensor's is its local piece."""
    local = [cast("Any", t).to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in local}
    return sum(storage.nbytes() for storage in storages.values())


def holds_fsdp2(model: Any) -> tuple[int, int, int]:
    groups = {id(m): m._get_fsdp_state()._fsdp_param_group for m in model.modules() if hasattr(m, "_get_fsdp_state")}
    params = [param for group in groups.values() for param in group.fsdp_params]
    sums = [param.unsharded_accumulated_grad for param in params]
    sums += [param._unsharded_param.grad for param in params] + [param.sharded_param.grad for param in params]
    sums += [group._partial_reduce_output for group in groups.values()]
    stored, gathered = [param.sharded_param for param in params], [param._unsharded_param for param in params]
    return nbytes(stored), nbytes(gathered), nbytes(sums)


def holds_fsdp1(model: Any) -> tuple[int, int, int]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    instances: Any = FullyShardedDataParallel.fsdp_modules(model)
    flat = [instance._handle.flat_param for instance in instances]
    sums = [getattr(each, "_saved_grad_shard", None) if each.grad is None else each.grad for each in flat]
    return nbytes(each._local_shard for each in flat), nbytes(each._full_param_padded for each in flat), nbytes(sums)


def holds_ddp(model: Any) -> tuple[int, int, int]:
    buckets = sum(bucket.buffer().nbytes for bucket in model.reducer._get_zeros_like_grad_buckets())
    return nbytes(model.parameters()), 0, nbytes(p.grad for p in model.parameters()) + buckets


HOLDS = {"ddp": holds_ddp, "fsdp1": holds_fsdp1, "fsdp2": holds_fsdp2, "hsdp": holds_fsdp2}


def check_memory(row: Row) -> None:
    model, seen = row.wrap(Net()), list[tuple[int, int, int]]()
    window(row, model, 1)
    window(row, model, 3, lambda: seen.append(HOLDS[row.wrapper](model)))
    job = row.job()
    predicted = held(job.model, row.wrapper, row.policy, job.shards)
    assert [(predicted.parameters, predicted.unsharded, predicted.gradients)] * 2 == seen[:2]


@pytest.mark.parametrize("name", names(2))
@on_ranks(2)
def test_two_ranks_hold_what_the_plan_predicts(name: str) -> None:
    check_memory(BY_NAME[name])


@pytest.mark.parametrize("name", names(4))
@on_ranks(4)
def test_four_ranks_hold_what_the_plan_predicts(name: str) -> None:
    check_memory(BY_NAME[name])


def test_each_wrapper_and_policy_has_a_row() -> None:
    from accumulate.plan.volume import POLICIES, WRAPPERS

    expected = {(wrapper, policy) for wrapper in WRAPPERS for policy in (*POLICIES, EACH) if wrapper != "ddp"}
    assert {(row.wrapper, row.policy) for row in ROWS} == expected | {("ddp", "balanced"), ("ddp", EACH)}
