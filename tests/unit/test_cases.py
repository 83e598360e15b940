"""Cases from users of other training stacks, on one process and an unwrapped model. Those that need ranks are
elsewhere.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accumulate import AccumulateError, Accumulator, WindowError
from support.loops import data, feed, grads, loss_of, matches, plain_net, whole
from support.oracle import Term, gradient, same


def ragged(*sizes: int, first: int = 0) -> list[Term]:
    """Micro-batches of these sizes, weighted by them."""
    return [data(0, first + index, n, float(n)) for index, n in enumerate(sizes)]


def test_case_1_ragged_micro_batches_weighted_by_their_length() -> None:
    model, terms = plain_net(), ragged(2, 8, 16, 1)
    reference = gradient(model, [whole(terms)])
    unweighted = gradient(model, [Term(t.x, t.y) for t in terms])
    assert any(not torch.allclose(unweighted[name], reference[name], rtol=0.05) for name in reference)
    feed(Accumulator(model, 4), model, terms, weighted=True)
    same(grads(model), reference)


def test_case_3_a_masked_loss_weighs_what_it_counts_and_not_its_shape() -> None:
    model = plain_net()
    masks = [torch.arange(8) < live for live in (1, 7)]
    acc = Accumulator(model, 2)
    for index, mask in enumerate(masks):
        x, y, _ = data(0, index, 8)
        with acc.step():
            acc.backward(functional.mse_loss(model(x)[mask], y[mask]), weight=mask.sum())
    kept = [Term(data(0, i, 8).x[mask], data(0, i, 8).y[mask]) for i, mask in enumerate(masks)]
    matches(model, plain_net(), [whole(kept)])


def test_case_4_weights_become_known_one_by_one_and_clipping_sees_the_final_norm() -> None:
    model, terms = plain_net(), ragged(3, 5, 2)
    reference = gradient(model, [whole(terms)])
    acc = Accumulator(model, 3)
    feed(acc, model, terms, weighted=True)
    same(grads(model), reference)
    norm = acc.clip_grad_norm_(1e-3)
    assert torch.linalg.vector_norm(torch.cat([g.flatten() for g in reference.values()])) == pytest.approx(float(norm))
    clipped = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads(model).values()]))
    assert float(clipped) == pytest.approx(1e-3, rel=1e-2)


def test_case_5_equal_windows_give_equal_gradients() -> None:
    model, terms = plain_net(), ragged(2, 5, 3)
    acc, seen = Accumulator(model, 3), []
    for _ in range(3):
        feed(acc, model, terms, weighted=True)
        seen.append(grads(model))
        model.zero_grad()
    for one in seen:
        same(one, gradient(model, [whole(terms)]))


def test_case_6_a_sum_type_loss_is_divided_by_all_items() -> None:
    model, terms = plain_net(), ragged(2, 7, 4)
    acc = Accumulator(model, 3)
    for term in terms:
        with acc.step():
            acc.backward((model(term.x) - term.y).square().sum(), weight=len(term.x), reduction="sum")
    reference = gradient(plain_net(), [whole(terms)])
    same(grads(model), {name: 8 * value for name, value in reference.items()})  # a mean over items of 8 elements each


def test_case_8_a_short_last_window_closed_by_flush_is_its_own_mean() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, i) for i in range(4)])
    matches(model, plain_net(), [data(0, i) for i in range(4)])
    model.zero_grad()
    feed(acc, model, [data(0, i) for i in range(4, 7)])
    assert not acc.is_boundary
    assert acc.flush() is True
    assert acc.is_boundary
    matches(model, plain_net(), [data(0, i) for i in range(4, 7)])
    assert acc.updates == 2
    assert acc.flush() is False
    assert acc.updates == 2


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_case_9_weights_after_a_window_equal_those_after_one_big_batch(steps: int) -> None:
    model, reference = plain_net(), plain_net()
    terms = [data(0, index) for index in range(steps)]
    acc, optimizer = Accumulator(model, steps), torch.optim.SGD(model.parameters(), lr=0.3)
    feed(acc, model, terms)
    assert acc.optimizer_step(optimizer)
    big = torch.optim.SGD(reference.parameters(), lr=0.3)
    loss_of(reference, whole(terms)).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    big.step()
    same(dict(model.named_parameters()), dict(reference.named_parameters()), 1e-12)


def test_case_10_a_dropped_micro_batch_contributes_nothing_whatever_its_loss_is() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    with acc.step():
        acc.backward(loss_of(model, data(0, 0)) * float("nan"), weight=0)
    feed(acc, model, ragged(4, first=1), weighted=True)
    with acc.step():
        acc.backward(loss_of(model, data(0, 2)) / 0.0, weight=0)
    assert acc.is_boundary
    matches(model, plain_net(), ragged(4, first=1))


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0.0), torch.tensor(0)], ids=repr)
def test_case_10_a_window_of_weight_zero_is_a_zero_gradient_and_a_zero_loss(weight: float | Tensor) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for index in range(2):
        with acc.step():
            acc.backward(loss_of(model, data(0, index)), weight=weight)
    assert acc.is_boundary
    assert all(not value.any() for value in grads(model).values())
    assert acc.loss is not None
    assert acc.loss.item() == 0.0
    model.zero_grad()
    feed(acc, model, ragged(3, 2), weighted=True)  # and the next window knows nothing of it
    matches(model, plain_net(), ragged(3, 2))


def test_case_10_an_all_ignored_cross_entropy_contributes_nothing() -> None:
    model = plain_net()
    labels = [torch.tensor([-100, -100, -100]), torch.tensor([1, -100, 3])]
    acc = Accumulator(model, 2)
    for index, label in enumerate(labels):
        with acc.step():
            loss = functional.cross_entropy(model(data(0, index).x), label)
            acc.backward(loss, weight=(label != -100).sum())
    reference = plain_net()
    expected = functional.cross_entropy(reference(data(0, 1).x), labels[1])
    expected.backward()  # type: ignore[no-untyped-call]  # torch's
    same(grads(model), grads(reference))
    assert acc.loss is not None
    assert acc.loss.item() == pytest.approx(expected.item())


def test_case_17_the_caller_owns_the_boundary() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    boundaries = []
    for index in range(6):
        feed(acc, model, [data(0, index)], boundary=index == 5)
        boundaries.append(acc.is_boundary)
    assert boundaries == [False] * 5 + [True]
    matches(model, plain_net(), [data(0, index) for index in range(6)])
    assert (acc.updates, acc.micro_steps) == (1, 6)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_case_18_clearing_gradients_in_every_iteration_is_an_error(set_to_none: bool) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    with pytest.raises(WindowError, match=r"cleared|changed"):
        for index in range(4):
            model.zero_grad(set_to_none=set_to_none)
            feed(acc, model, [data(0, index)])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_case_18_clearing_gradients_at_the_top_of_the_block_is_an_error(set_to_none: bool) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(WindowError, match="reset"), acc.step():
        model.zero_grad(set_to_none=set_to_none)
        acc.backward(loss_of(model, data(0, 1)))


class Count:
    """Something with a ``step`` that counts."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def zero_grad(self) -> None:
        pass


def test_case_19_and_20_an_update_is_taken_at_boundaries_only() -> None:
    model = plain_net()
    acc, optimizer, scheduler = Accumulator(model, 4), Count(), Count()
    taken, boundaries = [], []
    for index in range(8):
        feed(acc, model, [data(0, index)])
        boundaries.append(acc.is_boundary)
        taken.append(acc.optimizer_step(optimizer, schedulers=[scheduler]))
        if acc.is_boundary:
            model.zero_grad()
    assert [index + 1 for index, yes in enumerate(boundaries) if yes] == [4, 8]
    assert taken == boundaries
    assert (optimizer.steps, scheduler.steps) == (2, 2)


def test_case_25_a_loop_inside_one_block_is_one_micro_batch() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    with acc.step():
        for index in range(3):
            acc.backward(loss_of(model, data(0, index)))
    assert (acc.micro_steps, acc.is_boundary) == (1, False)
    feed(acc, model, [data(0, 3)])
    assert acc.is_boundary
    # the three losses of the first micro-batch add up, as the terms of one loss do
    terms = [Term(data(0, index).x, data(0, index).y, 0.5) for index in range(4)]
    reference = gradient(plain_net(), terms)
    same(grads(model), {name: value * 2.0 for name, value in reference.items()})


def test_case_26_a_new_length_takes_effect_at_the_next_window() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    lengths, start = [], 0
    for index in range(14):
        feed(acc, model, [data(0, index)])
        if index == 4:
            acc.steps = 4  # the window of micro-batches 4 and 5 is open
        if acc.is_boundary:
            matches(model, plain_net(), [data(0, i) for i in range(start, index + 1)])
            lengths.append(index + 1 - start)
            start = index + 1
            model.zero_grad()
    assert lengths == [2, 2, 2, 4, 4]


def test_case_26_a_callable_is_read_once_per_window() -> None:
    model, asked = plain_net(), []

    def steps(update: int) -> int:
        asked.append(update)
        return update + 1

    acc, boundaries = Accumulator(model, steps), []
    for index in range(6):
        feed(acc, model, [data(0, index)])
        boundaries.append(acc.is_boundary)
        if acc.is_boundary:
            model.zero_grad()
    assert boundaries == [True, False, True, False, False, True]
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_case_27_an_exception_in_the_second_micro_batch(when: str) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(ZeroDivisionError), acc.step():
        loss = loss_of(model, data(0, 1))
        if when == "after backward":
            acc.backward(loss)
        raise ZeroDivisionError
    assert acc.micro_steps == 1
    if when == "after backward":
        with pytest.raises(WindowError, match="reset"), acc.step():
            pass
    acc.reset()
    feed(acc, model, [data(0, index) for index in range(4)])
    assert acc.is_boundary
    matches(model, plain_net(), [data(0, index) for index in range(4)])


def test_case_27_an_exception_in_the_first_micro_batch_breaks_the_window_too() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    with pytest.raises(ZeroDivisionError), acc.step():
        acc.backward(loss_of(model, data(0, 7)))
        raise ZeroDivisionError
    with pytest.raises(WindowError, match="reset"), acc.step():
        pass
    acc.reset()
    feed(acc, model, [data(0, 0), data(0, 1)])
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


def test_case_27_an_exception_before_backward_does_not_cost_the_window() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(ZeroDivisionError), acc.step():
        loss_of(model, data(0, 7))
        raise ZeroDivisionError
    feed(acc, model, [data(0, 1)])
    assert acc.is_boundary
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


def test_case_28_totals_over_three_epochs_of_seven() -> None:
    model, scheduler = plain_net(), Count()
    acc = Accumulator(model, 4)
    for _ in range(3):
        for index in range(7):
            feed(acc, model, [data(0, index)])
            acc.optimizer_step(Count(), schedulers=[scheduler])
            if acc.is_boundary:
                model.zero_grad()
        assert acc.flush()
        acc.optimizer_step(Count(), schedulers=[scheduler])
        model.zero_grad()
    assert (acc.micro_steps, acc.updates, scheduler.steps) == (21, 6, 6)


def test_case_28_after_eight_micro_batches() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    positions = []
    for index in range(8):
        positions.append(acc.position)
        feed(acc, model, [data(0, index)])
        if acc.is_boundary:
            model.zero_grad()
    assert (acc.micro_steps, acc.updates) == (8, 2)
    assert positions == [0, 1, 2, 3, 0, 1, 2, 3]


class Linear(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_case_36_clipped_once_at_the_boundary_after_scaling() -> None:
    model = Linear()
    acc, optimizer = Accumulator(model, 2), torch.optim.SGD(model.parameters(), lr=1.0)
    for x in ([2.0, 0.0], [0.0, 2.0]):
        with acc.step():
            acc.backward(model(torch.tensor(x, dtype=torch.float64)))
        acc.optimizer_step(optimizer, max_norm=1.0)
    assert acc.grad_norm is not None
    assert float(acc.grad_norm) == pytest.approx(2**0.5)  # of [1, 1]
    assert model.weight.tolist() == pytest.approx([-(0.5**0.5)] * 2, rel=1e-5)


def test_case_38_reports_can_be_read_before_any_boundary() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    assert (acc.loss, acc.grad_norm) == (None, None)
    assert (acc.micro_steps, acc.updates, acc.position, acc.is_boundary) == (0, 0, 0, False)
    inside = []
    for index in range(6):
        with acc.step():
            acc.backward(loss_of(model, data(0, index)))
            inside.append(acc.is_boundary)
        assert acc.is_boundary == inside[-1]
        if acc.is_boundary:
            model.zero_grad()
    assert inside == [False, True] * 3


def test_case_39_an_optimizer_in_backward_is_refused_unless_each_micro_batch_is_a_window() -> None:
    model = plain_net()
    first: Any = next(model.parameters())
    handle = first.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(AccumulateError, match=r"0\.weight"):
        Accumulator(model, 2)
    acc = Accumulator(model, 1)
    feed(acc, model, [data(0, 0)])
    model.zero_grad()
    acc.steps = 2
    with pytest.raises(AccumulateError, match="hook"):
        feed(acc, model, [data(0, 1)])
    handle.remove()
    feed(Accumulator(model, 2), model, [data(0, 0)])


@pytest.mark.parametrize("weights", [(None,) * 4, (2,) * 4, (torch.tensor(2.0),) * 4], ids=["none", "int", "tensor"])
def test_case_51_the_reported_loss_is_the_weighted_mean(weights: tuple[Any, ...]) -> None:
    model = Linear()
    acc = Accumulator(model, 4)
    for value, weight in zip((1.0, 2.0, 3.0, 6.0), weights, strict=True):
        with acc.step():
            loss = model(torch.ones(2, dtype=torch.float64)) + value
            acc.backward(loss, weight=weight)
        assert loss.item() == value  # the user's own tensor is as it was
    assert acc.loss is not None
    assert acc.loss.item() == pytest.approx(3.0)
    assert not acc.loss.requires_grad


def test_case_51_no_graph_stays_alive_after_the_block() -> None:
    model = plain_net()
    kept: list[weakref.ref[Tensor]] = []
    hook = model[0].register_forward_hook(lambda m, args, output: kept.append(weakref.ref(output)))  # type: ignore[index]
    acc = Accumulator(model, 2)
    for index in range(2):
        with acc.step():
            loss = loss_of(model, data(0, index))
            acc.backward(loss)
        del loss
        gc.collect()
        assert [ref() for ref in kept] == [None] * (index + 1)
    hook.remove()


def test_case_52_generator_and_discriminator_in_one_loop() -> None:
    gen, disc = plain_net(1), plain_net(2)
    gen_acc, disc_acc = Accumulator(gen, 2), Accumulator(disc, 4)
    for index in range(4):
        x, y, _ = data(0, index)
        with gen_acc.step():
            disc.requires_grad_(False)  # frozen while the generator learns through it
            gen_acc.backward((disc(gen(x)) - y).square().mean())
            disc.requires_grad_(True)
        with disc_acc.step():
            disc_acc.backward((disc(gen(x).detach()) - y).square().mean())
        if gen_acc.is_boundary:
            pair = nn.Sequential(plain_net(1), plain_net(2).requires_grad_(False))
            reference = gradient(pair, [data(0, i) for i in (index - 1, index)])
            same({f"0.{name}": value for name, value in grads(gen).items()}, reference)
            gen.zero_grad()
    assert (gen_acc.updates, disc_acc.updates) == (2, 1)
    inputs = [Term(plain_net(1)(data(0, i).x).detach(), data(0, i).y) for i in range(4)]
    matches(disc, plain_net(2), inputs)


def test_case_53_one_accumulator_for_two_models() -> None:
    gen, disc = plain_net(1), plain_net(2)
    acc = Accumulator([gen, disc], 2)
    for index in range(2):
        with acc.step():
            acc.backward(loss_of(gen, data(0, index)) + loss_of(disc, data(0, index)))
    assert acc.is_boundary
    matches(gen, plain_net(1), [data(0, 0), data(0, 1)])
    matches(disc, plain_net(2), [data(0, 0), data(0, 1)])


def test_case_54_clipping_in_mid_window_raises() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    with pytest.raises(WindowError, match="is_boundary"):
        acc.clip_grad_norm_(1.0)
    feed(acc, model, [data(0, 0)])
    before = grads(model)
    with pytest.raises(WindowError, match="clip_grad_norm_"):
        acc.clip_grad_norm_(1.0)
    same(grads(model), before, 0.0)


def test_case_55_two_windows_per_update_as_in_sam() -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    for _ in range(2):
        for boundary in (False, False, True):
            feed(acc, model, [data(0, acc.position)], boundary=boundary)
        matches(model, plain_net(), [data(0, index) for index in range(3)])
        model.zero_grad()
    assert acc.updates == 2
