"""What may not touch a model while a window is open: other accumulators, optimizers, replaced parameters."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from accumulate import AccumulateError, Accumulator, WindowError
from support.loops import data, everyone, feed, grads, loss_of, plain_net
from support.oracle import gradient, same


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_steps_in_mid_window_is_stopped_before_it_does(kind: type[Any]) -> None:
    model = plain_net()
    before = [p.detach().clone() for p in model.parameters()]
    acc, optimizer = Accumulator(model, 4), kind(model.parameters(), lr=0.1)
    feed(acc, model, [data(0, i) for i in range(2)])
    with pytest.raises(WindowError, match=rf"{kind.__name__}.step\(\) after micro-batch 2 of 4"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    feed(acc, model, [data(0, i) for i in (2, 3)])
    same(grads(model), gradient(plain_net(), everyone(range(4))))
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_only_an_optimizer_that_holds_a_parameter_of_the_model_is_stopped() -> None:
    model, other = plain_net(), plain_net(2)
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    loss = other(data(0, 0).x).sum()
    loss.backward()
    sgd(other).step()
    one_layer = torch.optim.SGD([*other.parameters(), next(iter(model.parameters()))], lr=0.1)
    with pytest.raises(WindowError, match="partial"):
        one_layer.step()


def test_a_step_inside_the_boundary_block_comes_too_early() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(WindowError, match=r"SGD\.step"), acc.step():
        acc.backward(loss_of(model, data(0, 1)))
        sgd(model).step()


def test_between_windows_and_after_close_optimizers_are_free() -> None:
    model = plain_net()
    optimizer = sgd(model)
    acc = Accumulator(model, 2)
    hooks = len(_global_optimizer_pre_hooks)
    optimizer.step()
    feed(acc, model, [data(0, 0)])
    acc.reset()
    optimizer.step()
    feed(acc, model, [data(0, 0)])
    acc.close()
    optimizer.step()
    assert len(_global_optimizer_pre_hooks) == hooks - 1


def test_an_accumulator_that_is_collected_leaves_no_hook() -> None:
    gc.collect()
    hooks = len(_global_optimizer_pre_hooks)
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    del acc
    assert len(_global_optimizer_pre_hooks) == hooks
    sgd(model).step()


# -- other accumulators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["the model", "one layer"])
def test_two_windows_on_the_same_parameters_are_refused(shared: str) -> None:
    model = plain_net()
    theirs = model if shared == "the model" else nn.Sequential(model[2])  # type: ignore[index]  # a Sequential
    first, second = Accumulator(model, 2), Accumulator(theirs, 2)
    feed(first, model, [data(0, 0)])
    with (
        pytest.raises(WindowError, match=r"another Accumulator has a window open .* after micro-batch 1 of 2"),
        second.step(),
    ):
        pass
    feed(first, model, [data(0, 1)])
    same(grads(model), gradient(plain_net(), everyone(range(2))))
    model.zero_grad()
    feed(second, model, [data(0, 0)])
    with pytest.raises(WindowError, match="another Accumulator"), first.step():
        pass
    second.close()
    feed(first, model, [data(0, 0)])


def test_an_accumulator_that_was_replaced_does_not_stand_in_the_way() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    acc = Accumulator(model, 2)  # the old one is collected, and its window with it
    feed(acc, model, [data(0, 0)])


def test_case_52_accumulators_of_different_models_never_meet() -> None:
    generator, critic = plain_net(1), plain_net(2)
    first, second = Accumulator(generator, 2), Accumulator(critic, 4)
    feed(first, generator, [data(0, 0)])
    feed(second, critic, [data(0, i) for i in range(3)])
    feed(first, generator, [data(0, 1)])
    sgd(generator).step()
    assert (first.updates, second.position) == (1, 3)


# -- the model --------------------------------------------------------------------------------------------------------


def replace_parameter(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.zeros(8, 16, dtype=torch.float64))  # type: ignore[index]  # a Sequential


def add_parameter(model: nn.Module) -> None:
    model.append(nn.Linear(8, 8).double())  # type: ignore[operator]  # a Sequential


def replace_by_setter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))  # type: ignore[index]  # a Sequential


@pytest.mark.parametrize("change", [replace_parameter, add_parameter, replace_by_setter])
def test_parameters_that_came_after_construction_are_an_error_in_the_first_window(change: Any) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    change(model)
    with pytest.raises(AccumulateError, match=r"parameters of model are not those .* Construct it last"):
        feed(acc, model, [data(0, 0)])


def test_later_the_first_parameter_is_looked_at() -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    feed(acc, model, [data(0, 0)])
    replace_by_setter(model)
    with pytest.raises(AccumulateError, match="parameters of model are not those"):
        feed(acc, model, [data(0, 0)])


def test_a_model_that_is_moved_and_frozen_is_the_same() -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    model.to(torch.float32)
    next(model.parameters()).requires_grad_(False)
    x: Tensor = data(0, 0).x.float()
    with acc.step():
        acc.backward(model(x).square().mean())
    assert acc.is_boundary
