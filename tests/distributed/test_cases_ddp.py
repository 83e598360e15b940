"""Cases from users of other training stacks: DistributedDataParallel on two ranks, and what holds without a
wrapper there.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accumulate import AccumulateError, Accumulator, WindowError, no_sync
from distributed.arrangements import BY_NAME, Nested, Net, Shell, Structured, ddp
from support.counting import Collectives
from support.loops import data, equal_on_ranks, everyone, feed, grads, loss_of, matches, plain_net, rank, whole
from support.oracle import Term, gradient, mean_square, same
from support.ranks import Pool, RankError, on_ranks

OPTIONS = ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"]


def square_and_absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() + (output - target).abs().mean()


def run_backward(loss: Tensor, **options: bool) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


# -- weighting --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_case_2_only_the_total_over_ranks_is_right() -> None:
    model, sizes = ddp(plain_net()), ((4, 6), (8, 9))
    terms = [[data(r, i, n, float(n)) for i, n in enumerate(sizes[r])] for r in range(2)]
    per_rank = [gradient(plain_net(), [whole(mine)]) for mine in terms]
    reference = gradient(plain_net(), [whole([*terms[0], *terms[1]])])
    wrong = {name: (per_rank[0][name] + per_rank[1][name]) / 2 for name in reference}
    assert any(not torch.allclose(wrong[name], reference[name], rtol=1e-3) for name in reference)
    feed(Accumulator(model, 2), model, terms[rank()], weighted=True)
    same(grads(model), reference)
    equal_on_ranks(grads(model))


@on_ranks(2)
@pytest.mark.parametrize("device_weight", [False, True])
def test_case_10_all_weights_zero_on_one_rank_and_then_on_both(device_weight: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)

    def window(zero_ranks: tuple[int, ...]) -> None:
        for index in range(2):
            value = 0 if rank() in zero_ranks else 3
            with acc.step():
                weight = torch.tensor(float(value)) if device_weight else value
                acc.backward(loss_of(model, data(rank(), index)), weight=weight)
        assert acc.is_boundary

    window((1,))
    matches(model, plain_net(), [data(0, 0), data(0, 1)])
    model.zero_grad()
    window((0, 1))
    assert all(bool((value == 0).all()) for value in grads(model).values())
    model.zero_grad()
    window(())
    matches(model, plain_net(), everyone(range(2)))


@on_ranks(2)
def test_case_10_a_nan_loss_of_weight_zero_contributes_nothing() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    for index in range(3):
        with acc.step():
            loss = loss_of(model, data(rank(), index))
            bad = index == (1 if rank() == 0 else 2)  # off the boundary on one rank, at the boundary on the other
            acc.backward(loss * float("nan") if bad else loss, weight=0 if bad else 1)
    assert acc.is_boundary
    matches(model, plain_net(), [data(0, 0), data(0, 2), data(1, 0), data(1, 1)])


@on_ranks(2)
@pytest.mark.parametrize("option", ["", "small buckets", *OPTIONS])
def test_case_10_dropped_on_some_ranks_under_every_option(option: str) -> None:
    options = {"bucket_cap_mb": 0.001} if option == "small buckets" else {option: True} if option else {}
    row = BY_NAME["ddp"]
    model = ddp(row.seed(), **options)
    acc = Accumulator(model, 2)
    for weights in (((3, 3), (2, 0)), ((0, 1), (0, 0)), ((1, 0), (0, 5)), ((0, 2), (1, 1))):
        for index, weight in enumerate(weights[rank()]):
            with acc.step():
                acc.backward(loss_of(model, data(rank(), index)) * (1 if weight else float("nan")), weight=weight)
        assert acc.is_boundary
        terms = [Term(*data(r, i)[:2], float(w)) for r in range(2) for i, w in enumerate(weights[r]) if w]
        matches(model, row.seed(), terms)
        model.zero_grad()


# -- when to reduce ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_case_12_backward_alone_inside_reduces_as_if_both_were() -> None:
    sent = []
    for forward_inside in (True, False):
        model = ddp(plain_net())
        acc = Accumulator(model, 3)
        with Collectives() as seen:
            for index in range(3):
                early = None if forward_inside else loss_of(model, data(rank(), index))
                with acc.step():
                    acc.backward(loss_of(model, data(rank(), index)) if early is None else early)
        matches(model, plain_net(), everyone(range(3)))
        sent.append(seen.log)
    assert len([one for one in sent[0] if one.is_gradient_reduction]) == 1
    assert sent[0] == sent[1]


@on_ranks(2)
def test_case_13_two_forwards_then_two_backwards_in_a_boundary() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    with acc.step():
        losses = [loss_of(model, data(rank(), index)) for index in (1, 2)]
        for loss in losses:
            acc.backward(loss)
    terms = [Term(t.x, t.y, 0.5) for t in everyone(range(3))]
    same(grads(model), {name: 1.5 * value for name, value in gradient(plain_net(), terms).items()})
    equal_on_ranks(grads(model))


@on_ranks(2)
@pytest.mark.parametrize("first_is_boundary", [False, True])
def test_case_13_forward_in_one_block_and_backward_in_the_next(first_is_boundary: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    if first_is_boundary:
        feed(acc, model, [data(rank(), 9)])
    with acc.step():
        acc.backward(loss_of(model, data(rank(), 0)))
        late = loss_of(model, data(rank(), 1))
    if first_is_boundary:
        matches(model, plain_net(), everyone((9, 0)))
        model.zero_grad()
    with Collectives() as seen, acc.step():
        acc.backward(late)
    assert len(seen.reductions) == (0 if first_is_boundary else 1)
    if first_is_boundary:
        feed(acc, model, [data(rank(), 2)])
    assert acc.is_boundary
    matches(model, plain_net(), everyone((1, 2) if first_is_boundary else (0, 1)))


@on_ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("steps", [2, 3])
def test_case_13_each_block_runs_the_backward_of_the_forward_before(find_unused: bool, steps: int) -> None:
    model = ddp(plain_net(), find_unused_parameters=find_unused)
    acc = Accumulator(model, steps)
    late = loss_of(model, data(rank(), 0))
    for index in range(3 * steps):
        with acc.step():
            following = loss_of(model, data(rank(), index + 1))
            acc.backward(late)
        late = following
        if acc.is_boundary:
            matches(model, plain_net(), everyone(range(index + 1 - steps, index + 1)))
            model.zero_grad()
    assert acc.updates == 3


@on_ranks(2)
@pytest.mark.parametrize("way", ["reset", "close"])
def test_a_head_that_only_a_dropped_window_used_is_forgotten(way: str) -> None:
    """torch's reducer has noted it as used, and would reduce a gradient that is not there."""
    row = BY_NAME["ddp-find-unused"]
    model = row.build()
    acc = Accumulator(model, 2)

    def signed(index: int, value: float) -> Term:
        term = data(rank(), index)
        term.x[0, 0] = value
        return term

    for _ in range(2):
        feed(acc, model, [signed(index, -1.0) for index in range(2)])  # without the other head
        terms = [signed(index, -1.0) for index in range(2)]
        every: list[list[Term]] = [[], []]
        dist.all_gather_object(every, terms)
        found = row.gradients(model)
        same(found, gradient(row.seed(), [*every[0], *every[1]]))
        model.zero_grad()
        feed(acc, model, [signed(5, 1.0)])  # with it, off the boundary
        if way == "reset":
            acc.reset()
        else:
            acc.close()
            model.zero_grad()
            acc = Accumulator(model, 2)


@on_ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("windows", [1, 3])
def test_case_14_one_forward_two_losses_two_backwards_at_the_boundary(find_unused: bool, windows: int) -> None:
    model = ddp(plain_net(), find_unused_parameters=find_unused)
    acc = Accumulator(model, 2)
    for _ in range(windows):
        for index in range(2):
            x, y, _ = data(rank(), index)
            with acc.step():
                output = model(x)
                acc.backward((output - y).square().mean(), retain_graph=True)
                acc.backward((output - y).abs().mean())
        assert acc.is_boundary
        reference = gradient(plain_net(), everyone(range(2)), loss=square_and_absolute)
        same(grads(model), reference)
        equal_on_ranks(grads(model))
        model.zero_grad()


@on_ranks(2)
def test_case_15_calling_the_module_inside_ddp_is_an_error_at_the_boundary() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    feed(acc, cast("nn.Module", model.module), [data(rank(), 0)])
    with pytest.raises(AccumulateError, match=r"reduced nothing.*\.module"):
        feed(acc, cast("nn.Module", model.module), [data(rank(), 1)])
    assert not acc.is_boundary
    assert not acc.optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0))
    acc.reset()
    feed(acc, model, [data(rank(), 0), data(rank(), 1)])
    matches(model, plain_net(), everyone(range(2)))


@on_ranks(1)
@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard"])
def test_case_16_world_size_one(wrapper: str) -> None:
    model = plain_net()
    if wrapper == "ddp":
        model = ddp(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    acc = Accumulator(model, 8)
    feed(acc, model, [data(0, index) for index in range(8)])
    assert acc.is_boundary
    matches(model, plain_net(), everyone(range(8)))


@on_ranks(2)
def test_case_17_the_caller_owns_the_boundary() -> None:
    model = ddp(plain_net())
    acc, counts = Accumulator(model, 2), []
    for index in range(6):
        with Collectives() as seen:
            feed(acc, model, [data(rank(), index)], boundary=index == 5)
        counts.append(len(seen.reductions))
    assert counts == [0] * 5 + [1]
    matches(model, plain_net(), everyone(range(6)))


@on_ranks(2)
def test_case_17_a_window_closed_by_hand_may_be_unequal_on_the_ranks() -> None:
    model = ddp(plain_net())
    acc, own = Accumulator(model, 4), (2, 5)
    for index in range(own[rank()]):
        feed(acc, model, [data(rank(), index)], boundary=index == own[rank()] - 1)
    matches(model, plain_net(), [data(r, index) for r in range(2) for index in range(own[r])])


@on_ranks(2)
def test_case_18_clearing_gradients_in_every_iteration_is_an_error() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 4)
    with pytest.raises(WindowError, match="cleared"):
        for index in range(4):
            model.zero_grad()
            feed(acc, model, [data(rank(), index)])


@on_ranks(2)
def test_the_user_scales_and_the_library_only_steers() -> None:
    model = ddp(plain_net())
    acc, counts = Accumulator(model, 2), []
    for index in range(2):
        with Collectives() as seen, acc.step():
            run_backward(loss_of(model, data(rank(), index)) / 2)
        counts.append(len(seen.reductions))
    assert counts == [0, 1]
    matches(model, plain_net(), everyone(range(2)))
    assert acc.loss is None


@on_ranks(2)
def test_a_full_window_without_weights_sends_the_gradient_and_nothing_else() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    for window in range(3):
        with Collectives() as seen:
            feed(acc, model, [data(rank(), index) for index in range(3)])
        sent = [one for one in seen.log if one.dtype.is_floating_point]
        assert [one.numel for one in sent] == [sum(p.numel() for p in model.parameters())], f"window {window}"
        model.zero_grad()


@on_ranks(2)
def test_users_own_no_sync_around_the_block_is_respected_or_refused() -> None:
    model: Any = ddp(plain_net())
    acc = Accumulator(model, 2)
    with model.no_sync():
        feed(acc, model, [data(rank(), 0)])
        assert model.require_backward_grad_sync is False
    assert model.require_backward_grad_sync is True
    feed(acc, model, [data(rank(), 1)])
    matches(model, plain_net(), everyone(range(2)))
    model.zero_grad()
    feed(acc, model, [data(rank(), 2)])
    with pytest.raises(AccumulateError, match="no_sync"), model.no_sync():
        feed(acc, model, [data(rank(), 3)])  # the boundary: nothing may be lost silently
    acc.reset()
    feed(acc, model, [data(rank(), 0), data(rank(), 1)])
    matches(model, plain_net(), everyone(range(2)))


@on_ranks(2)
def test_the_bare_no_sync() -> None:
    model: Any = ddp(plain_net())
    with Collectives() as seen:
        with no_sync(model):
            run_backward(loss_of(model, data(rank(), 0)) / 2)
        assert not seen.reductions
        run_backward(loss_of(model, data(rank(), 1)) / 2)
    assert len(seen.reductions) == 1
    assert model.require_backward_grad_sync is True
    matches(model, plain_net(), everyone(range(2)))


@on_ranks(2)
def test_no_sync_beside_an_accumulator_pauses_backward_wherever_forward_was() -> None:
    model: Any = ddp(plain_net())
    acc = Accumulator(model, 1)
    loss = loss_of(model, data(rank(), 0)) / 2
    with Collectives() as seen, no_sync(model):
        run_backward(loss)
    assert not seen.reductions
    run_backward(loss_of(model, data(rank(), 1)) / 2)
    matches(model, plain_net(), everyone(range(2)))
    acc.close()


# -- wrappers ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("shape", ["nested", "shell", "head outside"])
def test_case_29_ddp_anywhere_in_the_model_reduces_right(shape: str) -> None:
    if shape == "nested":
        seed: nn.Module = Nested().double()
        model: nn.Module = Nested().double()
        model.load_state_dict(seed.state_dict())
        assert isinstance(model, Nested)
        model.body = ddp(model.body)
        model = ddp(model)
    else:
        seed = plain_net()
        model = Shell(ddp(plain_net()))
    head = nn.Linear(8, 8).double().requires_grad_(False) if shape == "head outside" else nn.Identity()
    acc = Accumulator(nn.Sequential(model, head) if shape == "head outside" else model, 3)
    with torch.no_grad():
        for a, b in zip(seed.parameters(), model.parameters(), strict=True):
            a.copy_(b)
    counts = []
    for index in range(3):
        with Collectives() as seen:
            x, y, _ = data(rank(), index)
            with acc.step():
                acc.backward((model(x) - y).square().mean())
        counts.append(len(seen.reductions))
    assert counts == [0, 0, 2 if shape == "nested" else 1]
    found = {name.removeprefix("body.") if shape != "nested" else name: value for name, value in grads(model).items()}
    same(found, gradient(seed, everyone(range(3))))
    equal_on_ranks(found)


@on_ranks(2)
@pytest.mark.parametrize("weighted", [False, True])
def test_case_29_a_list_of_a_plain_and_a_wrapped_model(weighted: bool) -> None:
    plain, wrapped = plain_net(1), ddp(plain_net(2))
    acc = Accumulator([plain, wrapped], 2)
    terms = [[Term(*data(r, i)[:2], 1.0 + weighted * (3 * r + i)) for i in range(2)] for r in range(2)]
    with Collectives() as seen:
        for term in terms[rank()]:
            with acc.step():
                loss = loss_of(plain, term) + loss_of(wrapped, term)
                acc.backward(loss, weight=term.weight if weighted else None)
    assert len(seen.reductions) == 1
    matches(wrapped, plain_net(2), [*terms[0], *terms[1]])
    same(grads(plain), gradient(plain_net(1), terms[rank()]))  # its sums stay on its rank


@on_ranks(2)
def test_case_32_a_plain_layer_works_and_sends_nothing() -> None:
    model = nn.Linear(8, 8).double()
    with pytest.warns(UserWarning, match="no wrapper"):
        acc = Accumulator(model, 2)
    seed = nn.Linear(8, 8).double()
    seed.load_state_dict(model.state_dict())
    with Collectives() as seen:
        for weighted in (False, True):
            terms = [data(rank(), index, 3, index + 1.0) for index in range(2)]
            feed(acc, model, terms, weighted)
            same(grads(model), gradient(seed, terms if weighted else [Term(t.x, t.y) for t in terms]))
            model.zero_grad()
        feed(acc, model, [data(rank(), 0)])
        assert acc.flush()
        acc.clip_grad_norm_(1.0)
        acc.close()
    assert seen.log == []


@on_ranks(2)
def test_case_34_unequal_steps_are_an_error_on_both_ranks_at_construction() -> None:
    model = ddp(plain_net())
    with pytest.raises(AccumulateError, match=r"(?s)steps.*2.*3"):
        Accumulator(model, 2 + rank())
    run_backward(loss_of(model, data(rank(), 0)))  # and the model is unharmed
    matches(model, plain_net(), everyone([0]))


@on_ranks(2)
def test_case_53_one_accumulator_for_two_wrapped_models() -> None:
    gen, disc = ddp(plain_net(1)), ddp(plain_net(2))
    acc = Accumulator([gen, disc], 2)
    for index in range(2):
        with Collectives() as seen, acc.step():
            acc.backward(loss_of(gen, data(rank(), index)))
            acc.backward(loss_of(disc, data(rank(), index)))
        assert len(seen.reductions) == (2 if index else 0)
    matches(gen, plain_net(1), everyone(range(2)))
    matches(disc, plain_net(2), everyone(range(2)))


@on_ranks(2)
def test_case_52_generator_and_discriminator_have_accumulators_of_their_own() -> None:
    gen, disc = ddp(plain_net(1)), ddp(plain_net(2))
    gen_acc, disc_acc = Accumulator(gen, 2), Accumulator(disc, 4)
    for index in range(4):
        x, y, _ = data(rank(), index)
        with gen_acc.step():
            disc.requires_grad_(False)
            gen_acc.backward((disc(gen(x)) - y).square().mean())
            disc.requires_grad_(True)
        with disc_acc.step():
            disc_acc.backward((disc(gen(x).detach()) - y).square().mean())
        if gen_acc.is_boundary:
            pair = nn.Sequential(plain_net(1), plain_net(2).requires_grad_(False))
            reference = gradient(pair, everyone((index - 1, index)))
            same({f"0.{name}": value for name, value in grads(gen).items()}, reference)
            gen.zero_grad()
    assert (gen_acc.updates, disc_acc.updates) == (2, 1)
    matches(disc, plain_net(2), [Term(plain_net(1)(t.x).detach(), t.y) for t in everyone(range(4))])


# -- DDP's options ----------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_case_40_static_graph_is_right_from_the_first_window_on(bucket_view: bool) -> None:
    model = ddp(plain_net(), static_graph=True, gradient_as_bucket_view=bucket_view)
    acc, counts = Accumulator(model, 2), []
    for window in range(3):
        for index in range(2):
            with Collectives() as seen:
                feed(acc, model, [data(rank(), 2 * window + index)])
            counts.append(len(seen.reductions))
        matches(model, plain_net(), everyone((2 * window, 2 * window + 1)))
        model.zero_grad()
    assert counts == [1, 1, 0, 1, 0, 1]


class Branches(nn.Module):
    """Two branches, of which a forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.stem = nn.Linear(8, 8).double()
            self.a = nn.Linear(8, 8).double()
            self.b = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = torch.tanh(self.stem(x))
        return torch.stack([self.a(x) if name == "a" else self.b(x) for name in use]).sum(0)


def branch_loss(model: nn.Module, term: Term, use: str) -> Tensor:
    return mean_square(model(term.x, use), term.y)


def branch_reference(plan: list[list[str]]) -> dict[str, Tensor]:
    """The gradient where rank r uses ``plan[r][i]`` in its micro-batch i."""
    model = Branches()
    for r, uses in enumerate(plan):
        for index, use in enumerate(uses):
            run_backward(branch_loss(model, data(r, index), use) / sum(map(len, plan)))
    return grads(model)


@on_ranks(2)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("closed", ["by count", "by flush"])
def test_case_41_branches_crossed_between_ranks(bucket_view: bool, set_to_none: bool, closed: str) -> None:
    model = ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    acc = Accumulator(model, 2 if closed == "by count" else 5)
    for plan in ([["a", "b"], ["b", "b"]], [["b", "ab"], ["ab", "a"]], [["a", "b"], ["a", "b"]]):
        for index, use in enumerate(plan[rank()]):
            with acc.step():
                acc.backward(branch_loss(model, data(rank(), index), use))
        assert acc.is_boundary or acc.flush()
        found, reference = grads(model), branch_reference(plan)
        same({name: found[name] for name in reference}, reference)
        equal_on_ranks({name: found[name] for name in reference})
        model.zero_grad(set_to_none=set_to_none)


@on_ranks(2)
def test_case_42_the_same_without_the_flag_is_an_error_before_the_update() -> None:
    model = ddp(Branches())
    acc = Accumulator(model, 2)
    plan = [["ab", "b"], ["ab", "b"]]  # a gets no gradient in the micro-batch that closes the window
    with acc.step():
        acc.backward(branch_loss(model, data(rank(), 0), plan[rank()][0]))
    with pytest.raises(AccumulateError, match="find_unused_parameters"), acc.step():
        acc.backward(branch_loss(model, data(rank(), 1), plan[rank()][1]))
    assert not acc.is_boundary
    assert not acc.optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0))
    acc.reset()
    for index in range(2):
        with acc.step():
            acc.backward(branch_loss(model, data(rank(), index), "ab"))
    same(grads(model), branch_reference([["ab", "ab"]] * 2))


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_case_43_a_checkpoint_around_the_whole_wrapped_model(reentrant: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    for window in range(2):
        indices = range(3 * window, 3 * window + 3)
        for index in indices:
            x, y, _ = data(rank(), index)
            with acc.step():
                output = cast("Tensor", checkpoint(model, x.requires_grad_(), use_reentrant=reentrant))
                acc.backward((output - y).square().mean())
        assert acc.is_boundary
        matches(model, plain_net(), everyone(indices))
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("closed", ["by count", "by flush"])
def test_case_44_a_comm_hook_is_called_once_per_bucket_and_window(closed: str) -> None:
    calls: list[int] = []
    model: Any = ddp(plain_net())

    def mean(state: Any, bucket: Any) -> Any:
        calls.append(bucket.index())
        work: Any = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, lambda state, bucket: mean(state, bucket))
    acc = Accumulator(model, 3 if closed == "by count" else 4)
    for window in range(3):
        calls.clear()
        feed(acc, model, [data(rank(), index) for index in range(3)])
        assert acc.is_boundary or acc.flush()
        assert calls == [0], f"window {window}"
        matches(model, plain_net(), everyone(range(3)))
        model.zero_grad()


@on_ranks(2)
def test_wrong_options_are_refused_by_name() -> None:
    from torch.distributed.algorithms.join import Join

    from accumulate import UnsupportedWrapperError

    with pytest.raises(UnsupportedWrapperError, match="skip_all_reduce_unused_params"):
        model = ddp(Net().double(), bucket_cap_mb=1e-6, skip_all_reduce_unused_params=True, find_unused_parameters=True)
        for index in range(2):  # torch makes several buckets once it has seen a backward
            run_backward(loss_of(model, data(rank(), index)))
        Accumulator(model, 2)
    seed = plain_net()
    named = [(name, p) for name, p in seed.named_parameters() if name == "0.weight"]
    with pytest.raises(UnsupportedWrapperError, match="delay_all_reduce_named_params"):
        Accumulator(ddp(seed, delay_all_reduce_named_params=named, param_to_hook_all_reduce=seed[2].weight), 2)  # type: ignore[index]  # a Sequential
    joined: Any = ddp(plain_net())
    acc = Accumulator(joined, 2)
    with pytest.raises(UnsupportedWrapperError, match="join"), contextlib.suppress(RuntimeError), Join([joined]):
        feed(acc, joined, [data(rank(), 0)])


@on_ranks(2)
def test_buffers_are_broadcast_at_most_once_per_window() -> None:
    model = ddp(nn.Sequential(plain_net(), nn.BatchNorm1d(8).double().eval()))
    acc = Accumulator(model, 3)
    for _ in range(2):
        with Collectives() as seen:
            feed(acc, model, [data(rank(), index) for index in range(3)])
        assert len([one for one in seen.log if "broadcast" in one.kind and one.dtype.is_floating_point]) <= 1
        model.zero_grad()


# -- exceptions, and after the library --------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("index", [1, 3], ids=["off the boundary", "at the boundary"])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_case_27_an_exception_then_reset_then_a_fresh_window(index: int, when: str) -> None:
    model = ddp(Fragile())
    acc = Accumulator(model, 4)
    feed(acc, model, [data(rank(), i) for i in range(index)])
    with pytest.raises(ZeroDivisionError), acc.step():
        FRAGILE["breaks"] = when == "inside"
        loss = loss_of(model, data(rank(), index))
        FRAGILE["breaks"] = False
        if when == "before":
            raise ZeroDivisionError
        acc.backward(loss)
        raise ZeroDivisionError
    assert acc.micro_steps == index
    acc.reset()
    feed(acc, model, [data(rank(), i) for i in range(4)])
    matches(model, Fragile(), everyone(range(4)))


FRAGILE = {"breaks": False}


class Break(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError


class Fragile(nn.Module):
    """A model whose backward can be told to raise half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = plain_net(1), plain_net(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if FRAGILE["breaks"]:
            hidden = cast("Tensor", Break.apply(hidden))  # type: ignore[no-untyped-call]  # torch does not annotate it
        return cast("Tensor", self.last(hidden))


@on_ranks(2)
def test_case_48_an_exception_off_the_boundary_then_a_backward_without_the_library() -> None:
    model: Any = ddp(plain_net())
    acc = Accumulator(model, 4)
    with pytest.raises(ZeroDivisionError), acc.step():
        loss_of(model, data(rank(), 0))
        raise ZeroDivisionError
    assert model.require_backward_grad_sync is True
    with Collectives() as seen:
        run_backward(loss_of(model, data(rank(), 1)))
    assert len(seen.reductions) == 1
    matches(model, plain_net(), everyone([1]))
    acc.close()


@on_ranks(2)
@pytest.mark.parametrize("end", ["close", "with", "with and an exception", "deleted"])
def test_after_the_end_the_model_is_as_it_was_found(end: str) -> None:
    model: Any = ddp(plain_net(), find_unused_parameters=True)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")

    def state() -> list[Any]:
        counts = [len(getattr(module, kind)) for module in model.modules() for kind in hooks]
        return [*counts, model.require_backward_grad_sync, model.require_forward_param_sync, list(model.__dict__)]

    before = state()
    if end == "deleted":
        acc = Accumulator(model, 1)
        feed(acc, model, [data(rank(), 0)])
        del acc
    elif end == "close":
        acc = Accumulator(model, 1)
        feed(acc, model, [data(rank(), 0)])
        assert state() != before
        acc.close()
        with pytest.raises(WindowError, match="closed"):
            feed(acc, model, [data(rank(), 0)])
    else:
        fail = end != "with"
        with pytest.raises(ZeroDivisionError) if fail else contextlib.nullcontext(), Accumulator(model, 1) as acc:
            feed(acc, model, [data(rank(), 0)])
            if fail:
                raise ZeroDivisionError
    assert state() == before
    model.zero_grad()
    run_backward(loss_of(model, data(rank(), 1)))
    matches(model, plain_net(), everyone([1]))


@on_ranks(2)
def test_a_backward_between_windows_is_plain_ddp() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0), data(rank(), 1)])
    model.zero_grad()
    with Collectives() as seen:
        run_backward(loss_of(model, data(rank(), 2)))
    assert len(seen.reductions) == 1
    matches(model, plain_net(), everyone([2]))


@on_ranks(2)
def test_a_backward_outside_any_block_in_mid_window_is_an_error_at_the_next_block() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 0)])
    run_backward(loss_of(model, data(rank(), 1)))
    with pytest.raises(WindowError, match=r"outside|changed"):
        feed(acc, model, [data(rank(), 2)])


# -- flush ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("option", ["", "small buckets", *OPTIONS])
def test_case_8_flush_with_unequal_counts_and_one_rank_without_any(option: str) -> None:
    options = {"bucket_cap_mb": 0.001} if option == "small buckets" else {option: True} if option else {}
    model = ddp(plain_net(), **options)
    acc = Accumulator(model, 4)
    feed(acc, model, [data(rank(), index) for index in range(4)])  # the first window, as static_graph needs one
    model.zero_grad()
    for own in ((0, 2), (1, 3)):
        feed(acc, model, [data(rank(), index) for index in range(own[rank()])])
        with Collectives() as seen:
            assert acc.flush()
        assert len(seen.reductions) == (2 if option == "small buckets" else 1)
        matches(model, plain_net(), [data(r, index) for r in range(2) for index in range(own[r])])
        model.zero_grad()
    assert not acc.flush()


def disagree(pool: Pool) -> str:
    with pytest.raises(RankError) as caught:
        pool.run(weights_on_one_rank_only)
    return str(caught.value)


def weights_on_one_rank_only() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 4)
    feed(acc, model, [data(rank(), 0)], weighted=rank() == 0)
    acc.flush()


def test_weights_on_one_rank_only_are_an_error_on_both_when_flushed(ranks: Callable[[int], Pool]) -> None:
    assert disagree(ranks(2)).count("AccumulateError: some losses of this window have a weight") == 2


# -- what runs in between ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "ddp-find-unused", "ddp-static-graph", "fsdp1-full", "fsdp2"])
def test_evaluation_between_two_micro_batches_does_not_harm_the_window(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 3)
    for index in range(3):
        if index:
            model.eval()
            with torch.no_grad():
                model(data(rank(), 50).x)
            model.train()
            model(data(rank(), 51).x)  # with a graph, of which nobody makes use
        feed(acc, model, [data(rank(), index)])
    assert acc.is_boundary
    same(row.gradients(model), gradient(row.seed(), everyone(range(3))))


@on_ranks(2)
@pytest.mark.parametrize("option", ["", "find_unused_parameters"])
def test_an_ema_copy_can_be_made_while_an_accumulator_is_attached(option: str) -> None:
    model = ddp(plain_net(), **({option: True} if option else {}))
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    ema = copy.deepcopy(cast("nn.Module", model.module))
    with Collectives() as seen:
        ema.zero_grad()
        run_backward(loss_of(ema, data(rank(), 5)))
    assert not seen.log
    same(grads(ema), gradient(plain_net(), [data(rank(), 5)]))
    feed(acc, model, [data(rank(), 1)])
    matches(model, plain_net(), everyone(range(2)))


@on_ranks(2)
@pytest.mark.parametrize("seed", [Net, Structured])
@pytest.mark.parametrize("option", ["", "find_unused_parameters"])
def test_case_51_no_graph_stays_alive_after_the_block(seed: type[Net], option: str) -> None:
    wrapped: Any = ddp(seed().double(), **({option: True} if option else {}))
    kept: list[weakref.ref[Tensor]] = []
    hook = wrapped.module.blocks[0].register_forward_hook(lambda m, args, output: kept.append(weakref.ref(output)))
    acc = Accumulator(wrapped, 2)
    gc.disable()  # a cycle that waits for the collector would hold the activations as long
    try:
        for index in range(4):
            with acc.step():
                output = wrapped(data(rank(), index).x)
                loss = (output if isinstance(output, Tensor) else output.logits).square().mean()
                acc.backward(loss)
            del loss, output
            assert [ref() for ref in kept] == [None] * (index + 1)
            if acc.is_boundary:
                wrapped.zero_grad()
    finally:
        gc.enable()
    hook.remove()


@on_ranks(2)
def test_a_named_group_holds_for_a_model_without_wrapper() -> None:
    model = plain_net()
    acc = Accumulator(model, 2, group=dist.group.WORLD)
    terms = [[data(r, i, 3, 1.0 + 2 * r + i) for i in range(2)] for r in range(2)]
    feed(acc, model, terms[rank()], weighted=True)
    for parameter in model.parameters():  # the caller averages by himself, which is what he names the group for
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    matches(model, plain_net(), [*terms[0], *terms[1]])


class Unusual(Net):
    """Returns an object of a class that nobody looks into."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(x))


@on_ranks(2)
def test_an_output_of_an_unknown_class_is_reduced_or_named_in_the_error() -> None:
    seed = Unusual().double()
    model = ddp(copy.deepcopy(seed))
    acc = Accumulator(model, 2)
    try:
        for index in range(2):
            x, y, _ = data(rank(), index)
            with acc.step():
                acc.backward((model(x).logits - y).square().mean())
    except AccumulateError as error:
        if "SimpleNamespace" not in str(error):
            raise
        return
    same(grads(model), gradient(seed, everyone(range(2)), forward=lambda m, x: cast("Tensor", m(x).logits)))


def penalised(model: nn.Module, term: Term) -> Tensor:
    x = term.x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mean_square(output, term.y) + mean_square(slope, torch.zeros_like(slope))


@on_ranks(2)
@pytest.mark.parametrize("option", ["", "find_unused_parameters", "gradient_as_bucket_view"])
def test_a_gradient_penalty_runs_a_backward_of_its_own_in_each_micro_batch(option: str) -> None:
    model, reference = ddp(plain_net(), **({option: True} if option else {})), plain_net()
    acc = Accumulator(model, 2)
    for index in range(2):
        with acc.step():
            acc.backward(penalised(model, data(rank(), index)))
    for term in everyone(range(2)):
        run_backward(penalised(reference, term) / 4)
    same(grads(model), grads(reference))
    equal_on_ranks(grads(model))


@on_ranks(2)
def test_two_forwards_in_one_loss() -> None:
    model, reference = ddp(plain_net()), plain_net()
    acc = Accumulator(model, 2)
    for index in range(2):
        x, y, _ = data(rank(), index)
        with acc.step():
            acc.backward((model(x) - model(x.flip(0)) - y).square().mean())
    for x, y, _ in everyone(range(2)):
        run_backward((reference(x) - reference(x.flip(0)) - y).square().mean() / 4)
    same(grads(model), grads(reference))


@on_ranks(2)
@pytest.mark.parametrize("closed", ["by count", "by flush"])
def test_sparse_gradients(closed: str) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)).double()

    model, reference = ddp(build()), build()
    acc = Accumulator(model, 2 if closed == "by count" else 3)
    for index in range(2):
        x, y, _ = data(rank(), index)
        with acc.step():
            acc.backward((model(x[:, 0].abs().mul(3).long()) - y).square().mean(), weight=1 + rank())
    assert acc.is_boundary or acc.flush()
    for r in range(2):
        for index in range(2):
            x, y, _ = data(r, index)
            run_backward((reference(x[:, 0].abs().mul(3).long()) - y).square().mean() * (1 + r) / 6)
    found, expected = ({name: value.to_dense() for name, value in grads(m).items()} for m in (model, reference))
    same(found, expected)
