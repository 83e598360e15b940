"""What is gathered, reduced and held between micro-batches under each policy, and the same exact gradient under all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accumulate import Accumulator, WindowError, no_sync
from distributed.arrangements import BY_NAME, Arrangement
from support.counting import Collectives
from support.loops import data, feed, loss_of, rank
from support.oracle import Term, gradient, same
from support.ranks import on_ranks

POLICIES = ["memory", "balanced", "speed"]
SHARDED = ["fsdp2", "fsdp2-children", "fsdp2-unsharded"]
OTHERS = ["ddp", "fsdp1-full", "fsdp1-full-orig", "fsdp1-grad-op", "fsdp1-no-shard", "plain"]


def terms_of(row: Arrangement, window: int, count: int) -> list[Term]:
    return [data(r, 10 * window + i, 1 + (r + i) % 3, 1.0 + r + i) for r in row.peers(rank()) for i in range(count)]


def run_window(
    acc: Accumulator, row: Arrangement, model: Any, window: int, count: int, weighted: bool, inside: bool = True
) -> None:
    for i in range(count):
        term = data(rank(), 10 * window + i, 1 + (rank() + i) % 3, 1.0 + rank() + i)
        outside = None if inside else (row.forward(model, term.x) - term.y).square().mean()
        with acc.step():
            loss = (row.forward(model, term.x) - term.y).square().mean() if outside is None else outside
            acc.backward(loss, weight=term.weight if weighted else None)


def check_windows(name: str, policy: str, inside: bool) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 3, policy=policy)
    for window, weighted in enumerate((False, True, True, False)):
        short = window == 2
        run_window(acc, row, model, window, 2 if short else 3, weighted, inside)
        assert acc.flush() is short
        terms = terms_of(row, window, 2 if short else 3)
        oracle = [t if weighted else Term(t.x, t.y) for t in terms]
        same(row.gradients(model), gradient(row.seed(), oracle, row.forward), row.tolerance)
        model.zero_grad()
    acc.close()


@on_ranks(2)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "backward only"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [*SHARDED, *OTHERS])
def test_the_gradient_is_exact_under_every_policy(name: str, policy: str, inside: bool) -> None:
    if name != "plain":
        check_windows(name, policy, inside)


@on_ranks(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["hsdp", "fsdp1-hybrid"])
def test_the_gradient_is_exact_on_a_2d_mesh(name: str, policy: str) -> None:
    check_windows(name, policy, inside=True)


# -- what is sent -----------------------------------------------------------------------------------------------------


def sent(model: nn.Module, policy: str, steps: int = 4) -> list[tuple[int, int, int]]:
    """All-gathers, reduce-scatters and all-reduces of each micro-batch of the second window."""
    acc = Accumulator(model, steps, policy=policy)
    feed(acc, model, [data(rank(), i) for i in range(steps)])
    model.zero_grad()
    counts = []
    for i in range(steps):
        with Collectives() as seen:
            feed(acc, model, [data(rank(), i)])
        kinds = [entry.kind for entry in seen.log]
        reduced = [entry for entry in seen.reductions if "scatter" in entry.kind]
        counts.append((len(seen.gathers), len(reduced), len(seen.reductions) - len(reduced)))
        assert len(kinds) == sum(counts[-1]), kinds
    model.zero_grad()
    acc.close()
    return counts


@on_ranks(2)
def test_case_46_each_policy_sends_the_least_that_it_can() -> None:
    """Two layers and a root, which forward does not reshard: five gathers when nothing is kept."""
    assert sent(BY_NAME["fsdp2"].build(), "memory") == [(5, 3, 0)] * 4
    assert sent(BY_NAME["fsdp2"].build(), "balanced") == [(5, 0, 0), (2, 0, 0), (2, 0, 0), (2, 3, 0)]
    assert sent(BY_NAME["fsdp2"].build(), "speed") == [(3, 0, 0), (0, 0, 0), (0, 0, 0), (0, 3, 0)]


@on_ranks(4)
def test_case_47_a_2d_mesh_reduces_between_nodes_once() -> None:
    assert sent(BY_NAME["hsdp"].build(), "memory") == [(5, 3, 0)] * 3 + [(5, 3, 3)]
    assert sent(BY_NAME["hsdp"].build(), "speed") == [(3, 0, 0), (0, 0, 0), (0, 0, 0), (0, 3, 3)]


# -- what is held -----------------------------------------------------------------------------------------------------


def groups(model: nn.Module) -> list[Any]:
    """FSDP2's parameter groups, of which torch has no public list."""
    states = [each._get_fsdp_state() for each in model.modules() if hasattr(each, "_get_fsdp_state")]  # type: ignore[operator]  # FSDPModule's
    return [group for state in states for group in state._fsdp_param_groups]


def unsharded_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of whole parameters and of whole gradients that FSDP2 holds now, besides the shards."""
    params = grads = 0
    for param in (each for group in groups(model) for each in group.fsdp_params):
        if (whole := getattr(param, "_unsharded_param", None)) is not None:
            params += whole.untyped_storage().nbytes()
            held = (whole.grad, param.unsharded_accumulated_grad)
            grads += sum(grad.untyped_storage().nbytes() for grad in held if grad is not None)
    return params, grads


@on_ranks(2)
@pytest.mark.parametrize(
    ("policy", "keeps_params", "keeps_grads"), [("memory", 0, 0), ("balanced", 1, 1), ("speed", 1, 1)]
)
def test_case_46_between_micro_batches_a_policy_holds_what_it_says(
    policy: str, keeps_params: int, keeps_grads: int
) -> None:
    row = BY_NAME["fsdp2"]
    size = sum(p.numel() * p.element_size() for p in row.seed().parameters())
    model = row.build()
    acc = Accumulator(model, 2, policy=policy)
    for _ in range(2):
        feed(acc, model, [data(rank(), 0)])
        assert unsharded_bytes(model) == (size * keeps_params, size * keeps_grads)
        feed(acc, model, [data(rank(), 1)])
        assert unsharded_bytes(model) == (0, 0)
        model.zero_grad()


# -- around windows ---------------------------------------------------------------------------------------------------


def flags(model: nn.Module) -> list[list[Any]]:
    names = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "reduce_scatter_unused_params")
    return [[*(getattr(g, name) for name in names), g.post_forward_mesh_info is None] for g in groups(model)]


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("first", ["accumulator", "forward"])
def test_flags_are_what_torch_would_have_made_them(policy: str, first: str) -> None:
    row = BY_NAME["fsdp2"]
    alone, model = row.build(), row.build()
    loss_of(alone, data(rank(), 0)).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    if first == "forward":
        with torch.no_grad():
            model(data(rank(), 0).x)
    acc = Accumulator(model, 2, policy=policy)
    for i in range(3):
        feed(acc, model, [data(rank(), i)])
        assert flags(model) == flags(alone)
    with pytest.raises(RuntimeError, match="no"), acc.step():
        raise RuntimeError("no")
    assert flags(model) == flags(alone)
    acc.close()
    assert flags(model) == flags(alone)


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1-full"])
@pytest.mark.parametrize("policy", POLICIES)
def test_reset_drops_a_window_under_every_policy(name: str, policy: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 3, policy=policy)
    feed(acc, model, [data(rank(), i) for i in range(2)])
    acc.reset()
    run_window(acc, row, model, 0, 3, weighted=False)
    same(row.gradients(model), gradient(row.seed(), [Term(t.x, t.y) for t in terms_of(row, 0, 3)]))


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_cleared_gradients_are_noticed_under_every_policy(policy: str) -> None:
    model = BY_NAME["fsdp2"].build()
    acc = Accumulator(model, 3, policy=policy)
    feed(acc, model, [data(rank(), 0)])
    model.zero_grad()
    with pytest.raises(WindowError, match="cleared"):
        feed(acc, model, [data(rank(), 1)])


@on_ranks(2)
def test_a_new_policy_takes_effect_at_the_next_window() -> None:
    row = BY_NAME["fsdp2"]
    model = row.build()
    acc = Accumulator(model, 2)
    assert acc.policy == "balanced"
    feed(acc, model, [data(rank(), 0)])
    acc.policy = "memory"
    assert unsharded_bytes(model)[1] > 0
    feed(acc, model, [data(rank(), 1)])
    same(row.gradients(model), gradient(row.seed(), [data(r, i) for r in range(2) for i in range(2)]))
    model.zero_grad()
    feed(acc, model, [data(rank(), 0)])
    assert unsharded_bytes(model) == (0, 0)
    with pytest.raises(ValueError, match="unknown policy 'fast'"):
        acc.policy = "fast"
    assert acc.policy == "memory"
    assert "memory" in repr(acc)


@on_ranks(2)
def test_no_sync_keeps_gradients_local_whatever_the_policy_of_an_accumulator() -> None:
    model = BY_NAME["fsdp2"].build()
    acc = Accumulator(model, 1, policy="memory")
    feed(acc, model, [data(rank(), 0)])
    model.zero_grad()
    with no_sync(model), Collectives() as seen:
        loss_of(model, data(rank(), 0)).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    assert seen.reductions == []


class Branches(nn.Module):
    """Two units of which a micro-batch may leave one out, and a unit that is used in part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        hidden: torch.Tensor = (self.a, self.b)[branch](x)
        output: torch.Tensor = self.last[branch](hidden)
        return output


def branches(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Branches().double()
    for unit in (model.a, model.b):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_branches(policy: str, world: int, shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = branches(mesh)
    torch.manual_seed(1)
    seed = Branches().double()
    acc = Accumulator(model, 2, policy=policy)
    for first in (0, 1):
        for i in range(2):
            term = data(rank(), i)
            with acc.step():
                acc.backward((model(term.x, first ^ i) - term.y).square().mean())
        oracle: dict[str, torch.Tensor] = {}
        for i in range(2):
            part = gradient(
                seed,
                [data(r, i) for r in range(world)],
                lambda m, x, branch=first ^ i: m(x, branch),  # type: ignore[misc]  # mypy cannot infer a lambda's default
            )
            for name, value in part.items():
                oracle[name] = oracle.get(name, torch.zeros_like(value)) + value / 2
        found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        same(found, oracle)
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_units_that_the_boundary_does_not_use_are_reduced(policy: str) -> None:
    check_branches(policy, 2, (2,))


@on_ranks(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_units_that_the_boundary_does_not_use_are_reduced_on_a_2d_mesh(policy: str) -> None:
    check_branches(policy, 4, (2, 2))
