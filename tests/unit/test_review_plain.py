"""What a review with fresh eyes found without any wrapper: things that went unnoticed, twice, or wrong."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accumulate import Accumulator, WindowError, no_sync
from support.loops import data, feed, grads, loss_of, matches, plain_net
from support.oracle import Term


def run_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


def fail(*args: object) -> None:
    raise MemoryError("no memory")


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["weight", "bias", "a deeper one"])
def test_models_that_share_a_parameter_are_refused(shared: str) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    if shared == "weight":
        second.weight = first.weight
    else:
        second.bias = first.bias
    models: list[nn.Module] = [first, nn.Sequential(nn.Tanh(), second) if shared == "a deeper one" else second]
    with pytest.raises(ValueError, match=r"model\[1\] and model\[0\] share a Parameter"):
        Accumulator(models, 2)


def test_a_parameter_shared_within_one_model_is_right() -> None:
    def tied() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(4)
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        model[2].weight = model[0].weight
        return model

    model, terms = tied(), [data(0, 0, 2, 2.0), data(0, 1, 6, 6.0)]
    acc = Accumulator(model, 2)
    feed(acc, model, terms, weighted=True)
    matches(model, tied(), terms)
    expected = torch.linalg.vector_norm(torch.cat([value.flatten() for value in grads(model).values()]))
    torch.testing.assert_close(acc.clip_grad_norm_(1e9), expected)


@pytest.mark.parametrize("weight", [torch.tensor(1 + 2j), torch.tensor([3j]), 1 + 2j])
def test_a_complex_weight_is_refused(weight: Any) -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    for call in (acc.backward, acc.scale):
        with pytest.raises(TypeError, match="weight must be"), acc.step():
            call(loss_of(model, data(0, 0)), weight)
    assert grads(model) == {}
    assert acc.micro_steps == 0


@pytest.mark.parametrize("model", [3, None, "model", [plain_net(), 3]])
def test_no_sync_of_something_else_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        no_sync(model)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_of_no_gradient_is_zero(norm_type: float) -> None:
    model = nn.ReLU()
    acc = Accumulator(model, 2)
    for _ in range(2):
        with acc.step():
            acc.backward(model(torch.ones(1, requires_grad=True)).sum())
    norm = acc.clip_grad_norm_(1.0, norm_type)
    assert (norm.shape, float(norm)) == ((), 0.0)


# -- what happens inside a window -------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("backwards", [1, 2, 3])
@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_cleared_and_refilled_in_mid_window_is_an_error(set_to_none: bool, backwards: int, frozen: int) -> None:
    def net() -> nn.Module:
        model = plain_net()
        for parameter in list(model.parameters())[:frozen]:
            parameter.requires_grad_(False)
        return model

    model = net()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(0, 0), data(0, 1)])
    model.zero_grad(set_to_none=set_to_none)
    for _ in range(backwards):  # as many as there were micro-batches: nothing may depend on a count
        run_backward(100 * loss_of(model, data(0, 2)))
    with pytest.raises(WindowError, match=r"cleared|changed"):
        feed(acc, model, [data(0, 3)])
    acc.reset()
    feed(acc, model, [data(0, index) for index in range(3)])
    matches(model, net(), [data(0, index) for index in range(3)])


def test_gradients_replaced_by_hand_in_mid_window_are_an_error() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    for param in model.parameters():
        assert param.grad is not None
        param.grad = 100 * param.grad
    with pytest.raises(WindowError, match=r"cleared|changed"):
        feed(acc, model, [data(0, 1)])
    acc.reset()
    assert grads(model) == {}


def test_an_accumulator_collected_in_mid_window_clears() -> None:
    model = plain_net()

    def epoch(indices: list[int]) -> None:
        acc = Accumulator(model, 2)
        feed(acc, model, [data(0, index) for index in indices])
        del acc
        gc.collect()

    epoch([7])
    assert grads(model) == {}
    epoch([0, 1])  # a closed window: its gradient is the user's
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_an_exception_swallowed_inside_the_block_breaks_the_window(index: int, retry: bool, weighted: bool) -> None:
    model = plain_net()
    acc, weight = Accumulator(model, 3), 2 if weighted else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    feed(acc, model, [data(0, i, 3, 2.0) for i in range(index)], weighted)
    with acc.step():
        handle = next(model.parameters()).register_hook(fail)  # type: ignore[no-untyped-call]  # torch's
        try:
            acc.backward(loss_of(model, data(0, index)), weight)
        except MemoryError:
            handle.remove()
            if retry:
                acc.backward(loss_of(model, data(0, index)), weight)
    assert (acc.is_boundary, acc.micro_steps, acc.updates) == (False, index, 0)
    assert not acc.optimizer_step(optimizer)
    for _ in range(2):
        with pytest.raises(WindowError, match=r"broken.*reset\(\)"), acc.step():
            pass
    with pytest.raises(WindowError, match="broken"):
        acc.flush()
    acc.reset()
    feed(acc, model, [data(0, i) for i in range(3)])
    matches(model, plain_net(), [data(0, i) for i in range(3)])


@pytest.mark.parametrize("index", [1, 2], ids=["off the boundary", "at the boundary"])
def test_a_block_without_backward_after_others_is_an_error_and_not_counted(index: int) -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(0, i) for i in range(index)])
    with pytest.raises(WindowError, match=r"no backward\(\)"), acc.step():
        loss_of(model, data(0, 7))
    assert (acc.micro_steps, acc.is_boundary, acc.position) == (index, False, index)
    feed(acc, model, [data(0, i) for i in range(index, 3)])  # nothing is lost
    assert acc.is_boundary
    matches(model, plain_net(), [data(0, i) for i in range(3)])


@pytest.mark.parametrize("empty", [1, 2])
def test_a_block_without_backward_before_others_is_an_error(empty: int) -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    for _ in range(empty):
        with acc.step():
            loss_of(model, data(0, 7))
    with pytest.raises(WindowError, match=r"no backward\(\)"):
        feed(acc, model, [data(0, 0)])
    acc.reset()
    feed(acc, model, [data(0, i) for i in range(3)])
    matches(model, plain_net(), [data(0, i) for i in range(3)])


def test_a_bare_window_may_skip_backward_anywhere() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    for skipped in range(3):
        for index in range(3):
            with acc.step():
                loss = loss_of(model, data(0, index)) / 2
                if index != skipped:
                    run_backward(loss)
        assert acc.is_boundary
        matches(model, plain_net(), [data(0, index) for index in range(3) if index != skipped])
        model.zero_grad()
    assert acc.updates == 3
    assert acc.loss is None


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_weighted_block_without_backward_has_no_weight(skipped: int) -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    terms = [data(0, index, 3, index + 1.0) for index in range(3)]
    for index, term in enumerate(terms):
        with acc.step():
            if index != skipped:
                acc.backward(loss_of(model, term), weight=term.weight)
    assert acc.is_boundary
    matches(model, plain_net(), [term for index, term in enumerate(terms) if index != skipped])


# -- one update for each window ---------------------------------------------------------------------------------------


def pair(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """An optimizer of the weights and one of the biases."""
    named = list(model.named_parameters())
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    return torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)


def trained(terms: list[list[Term]]) -> dict[str, Tensor]:
    from support.oracle import train

    return train(plain_net(), terms, 0.1)[1]


def weights_are(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("between", ["nothing", "flush"])
def test_an_update_is_taken_once(between: str) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # a second step would move again
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    for window in range(2):
        taken = []
        for index in range(2):
            feed(acc, model, [data(0, index)])
            taken.append(acc.optimizer_step(optimizer, schedulers=[scheduler]))
        assert taken == [False, True]
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if between == "flush":
            assert not acc.flush()
        for _ in range(3):
            assert not acc.optimizer_step(optimizer, schedulers=[scheduler], max_norm=1.0)
        weights_are(model, before)
        assert scheduler.last_epoch == acc.updates == window + 1


def test_an_update_of_a_flushed_window_is_taken_once() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    feed(acc, model, [data(0, 0)])
    assert acc.flush()
    assert acc.optimizer_step(optimizer, schedulers=[scheduler])
    assert not acc.flush()
    assert acc.is_boundary  # until the next block is entered
    assert not acc.optimizer_step(optimizer, schedulers=[scheduler])
    assert scheduler.last_epoch == 1
    weights_are(model, trained([[data(0, 0)]]))


def test_two_optimizers_in_two_calls_both_take_the_update() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    first, second = pair(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 100) for each in (first, second)]
    for _ in range(2):
        feed(acc, model, [data(0, 0), data(0, 1)])
        assert acc.optimizer_step(first, schedulers=schedulers[:1])
        assert acc.optimizer_step(first, second, schedulers=schedulers[1:])  # for the second alone
        assert not acc.optimizer_step(first, schedulers=schedulers[:1])
        assert not acc.optimizer_step(first, second, schedulers=schedulers)
    assert [each.last_epoch for each in schedulers] == [2, 2]
    weights_are(model, trained([[data(0, 0), data(0, 1)]] * 2))


def test_two_optimizers_in_one_call_take_the_update_once() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    optimizers = pair(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 100)
    for _ in range(2):
        feed(acc, model, [data(0, 0), data(0, 1)])
        assert acc.optimizer_step(*optimizers, schedulers=[scheduler])
        assert not acc.optimizer_step(*optimizers, schedulers=[scheduler])
        for each in optimizers:
            assert not acc.optimizer_step(each, schedulers=[scheduler])
    assert scheduler.last_epoch == 2
    weights_are(model, trained([[data(0, 0), data(0, 1)]] * 2))
