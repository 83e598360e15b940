"""What a review with fresh eyes found under wrappers, on two ranks: wrong gradients, hangs, and errors that were
swallowed.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumulate import Accumulator, WindowError, no_sync
from distributed.arrangements import BY_NAME, ddp
from support.counting import Collectives
from support.loops import data, equal_on_ranks, everyone, feed, grads, loss_of, matches, plain_net, rank
from support.oracle import Term, gradient, same
from support.ranks import on_ranks

WRAPPED = ["ddp", "fsdp2", "fsdp2-children"]
NAN = float("nan")


def run_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return cast("nn.Module", fully_shard(model))


def plan(window: int, dropped: Sequence[tuple[int, int, int]]) -> list[list[Term]]:
    """Both ranks' micro-batches of a window; those in ``dropped`` (window, rank, index) have the weight 0."""
    return [
        [data(r, 2 * window + i, 3, 0.0 if (window, r, i) in dropped else 1.0 + r + 2 * i) for i in range(2)]
        for r in range(2)
    ]


def live(terms: Sequence[Sequence[Term]]) -> list[Term]:
    return [term for mine in terms for term in mine if term.weight]


def number(term: Term) -> int:
    """The weight as a number: a zero drops the micro-batch."""
    return int(term.weight)


# -- a micro-batch dropped on one rank, at the boundary ---------------------------------------------------------------


def two_layers(middle: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(8, middle), nn.Linear(middle, 8)).double()


@on_ranks(2)
@pytest.mark.parametrize("given", ["list", "reversed list", "plain root"])
@pytest.mark.parametrize("middle", [8, 5], ids=["equal shapes", "unequal shapes"])
@pytest.mark.parametrize("window", [0, 1])
def test_two_ddps_one_behind_the_other_and_one_rank_drops_the_boundary(given: str, middle: int, window: int) -> None:
    model = two_layers(middle)
    for index in range(2):
        model[index] = ddp(model[index])
    listed = [model[0], model[1]] if given == "list" else [model[1], model[0]]
    acc = Accumulator(model if given == "plain root" else listed, 2)
    for w in range(3):
        terms = plan(w, [(window, 0, 1)])
        for term in terms[rank()]:
            with acc.step():
                acc.backward(loss_of(model, term) * (1 if term.weight else NAN), weight=number(term))
        assert acc.is_boundary
        matches(model, two_layers(middle), live(terms))
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("outputs", [(8, 8), (8, 5)], ids=["equal shapes", "unequal shapes"])
@pytest.mark.parametrize("dropped", [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_two_ddps_side_by_side_and_one_rank_drops(
    backwards: int, outputs: tuple[int, int], dropped: tuple[int, int, int]
) -> None:
    seeds = [plain_net(1, 8, outputs[0]), plain_net(2, 8, outputs[1])]
    models = [ddp(copy.deepcopy(seed)) for seed in seeds]
    acc = Accumulator(models, 2)
    for w in range(2):
        terms = plan(w, [dropped])
        for term in terms[rank()]:
            with acc.step():
                losses = [
                    loss_of(model, Term(term.x, term.y[:, :n])) * (1 if term.weight else NAN)
                    for model, n in zip(models, outputs, strict=True)
                ]
                for loss in losses if backwards == 2 else [losses[0] + losses[1]]:
                    acc.backward(loss, weight=number(term))
        for model, seed, n in zip(models, seeds, outputs, strict=True):
            matches(model, seed, [Term(t.x, t.y[:, :n], t.weight) for t in live(terms)])
            model.zero_grad()


def square_and_absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() + (output - target).abs().mean()


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "ddp find_unused_parameters", "fsdp2", "fsdp2-children"])
@pytest.mark.parametrize("dropped", [[(0, 0, 1)], [(1, 0, 1)], [(1, 1, 0)], [(1, 0, 1), (1, 1, 1)]])
def test_two_terms_in_each_block_and_one_rank_drops(name: str, dropped: list[tuple[int, int, int]]) -> None:
    name, _, option = name.partition(" ")
    row = BY_NAME[name]
    model = ddp(row.seed(), **{option: True}) if option else row.build()
    acc = Accumulator(model, 2)
    for w in range(2):
        terms = plan(w, dropped)
        for term in terms[rank()]:
            factor = 1 if term.weight else NAN
            with acc.step():
                output = model(term.x)
                acc.backward((output - term.y).square().mean() * factor, number(term), retain_graph=True)
                acc.backward((output - term.y).abs().mean() * factor, number(term))
        assert acc.is_boundary
        found = row.gradients(model)
        same(found, gradient(row.seed(), live(terms), loss=square_and_absolute))
        equal_on_ranks(found)
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("given", ["list", "layers of a plain root"])
@pytest.mark.parametrize("dropped", [[(0, 0, 0)], [(0, 0, 1)], [(1, 1, 1)], [(1, 0, 0), (1, 1, 0)]])
def test_a_plain_head_beside_fully_shard_gets_nothing_of_a_dropped_loss(
    given: str, dropped: list[tuple[int, int, int]]
) -> None:
    model = cast("nn.Sequential", plain_net())
    backbone = sharded(model[0])
    with pytest.warns(UserWarning, match="no FSDP unit holds" if given != "list" else None):
        acc = Accumulator([backbone, model[2]] if given == "list" else model, 2)
    for w in range(2):
        terms = plan(w, dropped)
        for term in terms[rank()]:
            with acc.step():
                acc.backward(loss_of(model, term) * (1 if term.weight else NAN), weight=number(term))
        reference, found = gradient(plain_net(), live(terms)), grads(model)
        same({n: found[n] for n in found if n[0] == "0"}, {n: reference[n] for n in reference if n[0] == "0"})
        head = {n: found[n] for n in found if n[0] == "2"}
        if given == "list":  # its own model: the mean over this rank's items
            reference = gradient(plain_net(), live([terms[rank()]]))
        else:  # a part of a wrapped model: right once the user has averaged it over the ranks
            for value in head.values():
                dist.all_reduce(value)
                value /= 2
        same(head, {n: reference[n] for n in reference if n[0] == "2"})
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("beside", ["ddp-static-graph", "fsdp2", "ddp"])
@pytest.mark.parametrize("dropped", [[(0, 0, 0)], [(0, 1, 1)], [(1, 0, 0), (1, 0, 1)]])
def test_a_loss_of_two_models_whose_slope_is_not_finite_is_dropped_from_both(
    beside: str, dropped: list[tuple[int, int, int]]
) -> None:
    row = BY_NAME[beside]
    first, second = row.build(), ddp(plain_net(2))
    acc = Accumulator([first, second], 2)
    for w in range(2):
        terms = plan(w, dropped)
        for term in terms[rank()]:
            with acc.step():
                losses = loss_of(first, term), loss_of(second, term)
                if not term.weight:
                    losses = ((losses[0] - losses[0].detach()).sqrt(), (losses[1] - losses[1].detach()).sqrt())
                acc.backward(losses[0] + losses[1], weight=number(term))
        for model, seed, found in ((first, row.seed(), row.gradients(first)), (second, plain_net(2), grads(second))):
            same(found, gradient(seed, live(terms)))
            equal_on_ranks(found)
            model.zero_grad()


# -- what happened to the gradients between two blocks ----------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("where", ["before the block", "inside the block"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_model_zero_grad_in_mid_window_is_an_error(name: str, where: str, set_to_none: bool) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    if where == "before the block":
        model.zero_grad(set_to_none=set_to_none)
        with pytest.raises(WindowError, match=r"cleared|changed"):
            feed(acc, model, [data(rank(), 1)])
    else:
        with pytest.raises(WindowError, match=r"cleared|changed"), acc.step():
            model.zero_grad(set_to_none=set_to_none)
            acc.backward(loss_of(model, data(rank(), 1)))
    acc.reset()
    feed(acc, model, [data(rank(), 2), data(rank(), 3)])
    same(row.gradients(model), gradient(row.seed(), everyone((2, 3))))


def freeze(model: nn.Module, what: str) -> nn.Module:
    """``plain_net`` with the first parameter or the first layer frozen."""
    frozen = {"nothing": 0, "first parameter": 1, "first layer": 2, "all but the last": 3}[what]
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    return model


@on_ranks(2)
@pytest.mark.parametrize("what", ["nothing", "first parameter", "first layer", "all but the last"])
@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard", "fully_shard of layers"])
@pytest.mark.parametrize("cleared", [False, True], ids=["added", "cleared and refilled"])
def test_a_backward_outside_in_mid_window_is_noticed(what: str, wrapper: str, cleared: bool) -> None:
    model = freeze(plain_net(), what)
    if wrapper == "fully_shard of layers":
        for layer in (cast("nn.Sequential", model)[0], cast("nn.Sequential", model)[2]):
            sharded(layer)
    model = ddp(model) if wrapper == "ddp" else sharded(model)
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    if cleared:
        model.zero_grad()
    run_backward(100 * loss_of(model, data(rank(), 1)))
    with pytest.raises(WindowError, match=r"cleared|changed"):
        feed(acc, model, [data(rank(), 2)])
    acc.reset()
    model.zero_grad()
    feed(acc, model, [data(rank(), 3), data(rank(), 4)])
    matches(model, freeze(plain_net(), what), everyone((3, 4)))


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPED)
def test_an_accumulator_collected_in_mid_window_leaves_nothing(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def epoch(indices: Sequence[int]) -> None:
        acc = Accumulator(model, 2)
        feed(acc, model, [data(rank(), index) for index in indices])
        del acc
        gc.collect()

    epoch([7])
    optimizer.zero_grad()
    epoch([0, 1])
    same(row.gradients(model), gradient(row.seed(), everyone((0, 1))))


# -- exceptions -------------------------------------------------------------------------------------------------------


def fail(*args: object) -> None:
    raise MemoryError("no memory")


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("retry", [True, False])
def test_an_exception_swallowed_inside_the_block_breaks_the_window(name: str, retry: bool) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 0)])
    with acc.step():
        output = model(data(rank(), 1).x.requires_grad_())
        halfway = output.tanh()
        halfway.register_hook(fail)
        try:
            acc.backward(halfway.sum() + output.sum())
        except MemoryError:
            if retry:
                acc.backward(loss_of(model, data(rank(), 1)))
    assert acc.micro_steps == 1
    for _ in range(2):
        with pytest.raises(WindowError, match=r"broken.*reset\(\)"):
            feed(acc, model, [data(rank(), 2)])
    with pytest.raises(WindowError, match="broken"):
        acc.flush()
    acc.reset()
    feed(acc, model, [data(rank(), index) for index in range(3)])
    same(row.gradients(model), gradient(row.seed(), everyone(range(3))))


@on_ranks(2)
@pytest.mark.parametrize("name", [*WRAPPED, "fsdp1-full"])
def test_no_sync_nested_in_a_block_does_not_hide_an_exception(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    with pytest.raises(ZeroDivisionError), acc.step():
        run_backward(loss_of(model, data(rank(), 7)) / 2)
        with no_sync(model), torch.no_grad():
            model(data(rank(), 8).x)
        raise ZeroDivisionError
    with pytest.raises(WindowError, match="broken"):
        feed(acc, model, [data(rank(), 0)])
    acc.reset()
    for index in range(2):
        with acc.step():
            run_backward(loss_of(model, data(rank(), index)) / 2)
    same(row.gradients(model), gradient(row.seed(), everyone(range(2))))


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("index", [1, 2], ids=["off the boundary", "at the boundary"])
def test_a_block_without_backward_among_others_is_an_error(name: str, index: int) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), i) for i in range(index)])
    with pytest.raises(WindowError, match=r"no backward\(\)"), acc.step():
        loss_of(model, data(rank(), 7))
    assert (acc.micro_steps, acc.is_boundary) == (index, False)
    acc.reset()
    feed(acc, model, [data(rank(), i) for i in range(3)])
    same(row.gradients(model), gradient(row.seed(), everyone(range(3))))


# -- small ones -------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", [*WRAPPED, "fsdp1-full"])
def test_no_sync_nested_in_a_boundary_after_its_backward(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    for window in range(2):
        for index in (2 * window, 2 * window + 1):
            with acc.step():
                acc.backward(loss_of(model, data(rank(), index)))
                with no_sync(model), torch.no_grad():
                    if name != "fsdp1-full":  # torch 2.13: there a forward after the reduction hides gradients anyway
                        model(data(rank(), 9).x)
        assert acc.is_boundary
        same(row.gradients(model), gradient(row.seed(), everyone((2 * window, 2 * window + 1))))
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["second backward of one graph", "second of two forwards", "the only backward"])
def test_a_graph_from_off_the_boundary_reduces_when_its_backward_comes_after_the_window(kind: str) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    with acc.step():
        late = loss_of(model, data(rank(), 0))
        if kind == "second backward of one graph":
            acc.backward(late, retain_graph=True)
        elif kind == "second of two forwards":
            acc.backward(loss_of(model, data(rank(), 1)))
    acc.reset()
    feed(acc, model, [data(rank(), i) for i in (2, 3)])
    same(grads(model), gradient(plain_net(), everyone((2, 3))))
    model.zero_grad()
    run_backward(late)
    matches(model, plain_net(), everyone((0,)))


class Keeper(nn.Module):
    """A model that keeps its loss as an attribute and returns nothing with a graph."""

    def __init__(self, returns: object) -> None:
        super().__init__()
        self.net = plain_net()
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> object:
        self.loss = (self.net(x) - y).square().mean()
        return self.loss.detach() if self.returns == "detached" else self.returns


@on_ranks(2)
@pytest.mark.parametrize("returns", [None, "detached", "text", 3])
def test_ddp_whose_loss_is_an_attribute_is_reduced(returns: object) -> None:
    keeper = Keeper(returns)
    model = ddp(keeper)
    acc, counts = Accumulator(model, 2), []
    for window in range(2):
        for index in range(2):
            x, y, _ = data(rank(), 2 * window + index)
            with Collectives() as seen, acc.step():
                model(x, y)
                acc.backward(keeper.loss)
            counts.append(len(seen.reductions))
        matches(keeper.net, plain_net(), everyone((2 * window, 2 * window + 1)))
        model.zero_grad()
    assert counts == [0, 1, 0, 1]


class OneTrainable(nn.Module):
    """Two parameters of which FSDP1 gives each rank one; only rank 0's is trainable."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=dtype))
        self.b = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a * self.b * x


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_clipping_fsdp1_where_one_rank_has_no_gradient(
    dtype: torch.dtype, norm_type: float, default: torch.dtype
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.set_default_dtype(default)
    untyped: Any = FullyShardedDataParallel
    model: nn.Module = untyped(OneTrainable(dtype), device_id=torch.device("cpu"), use_orig_params=True)
    acc = Accumulator(model, 2)
    for _ in range(2):
        with acc.step():
            acc.backward(model(torch.full((4,), 2.0, dtype=dtype)).sum())
    norm = acc.clip_grad_norm_(1.0, norm_type)
    expected = 4.0 if norm_type == 2.0 else 2.0
    assert norm.shape == ()
    assert float(norm) == pytest.approx(expected, rel=1e-3)
    pieces = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
    assert len(pieces) == (1 if rank() == 0 else 0)
    for piece in pieces:
        torch.testing.assert_close(piece, torch.full((4,), 2 / expected, dtype=dtype), rtol=1e-2, atol=0)


@on_ranks(2)
@pytest.mark.parametrize("steps", [1, 2])
def test_fully_shard_of_a_module_without_parameters(steps: int) -> None:
    model = sharded(nn.ReLU())
    acc = Accumulator(model, steps)
    for _ in range(steps):
        with acc.step():
            acc.backward(model(torch.ones(3, requires_grad=True)).sum(), weight=2)
    assert acc.is_boundary
    assert float(acc.clip_grad_norm_(1.0)) == 0.0
    with no_sync(model):
        model(torch.ones(3))
