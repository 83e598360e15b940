"""Nothing outlives its use: no graph, no accumulator, no hook; and what a user kept is his."""

from __future__ import annotations

import gc
import weakref
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from accumulate import Accumulator, SyncControl, WindowError, no_sync, register
from support.loops import data, feed, grads, loss_of, matches, plain_net
from support.oracle import same


class Wrapper(nn.Module):
    """A wrapper of the tests' own, which counts what it is told."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.told: list[str] = []
        self.reduces = True

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.module(x))


class Control(SyncControl):
    """An adapter as users write them."""

    @property
    def groups(self) -> tuple[()]:
        return ()

    @property
    def wrapper(self) -> Wrapper:
        return cast("Wrapper", self.module)

    def begin(self, reduce: bool) -> None:
        self.wrapper.told.append("reduce" if reduce else "pause")

    def end(self) -> None:
        self.wrapper.told.append("end")

    def finish(self) -> bool:
        return self.wrapper.reduces

    def flush(self) -> None:
        self.wrapper.told.append("flush")

    def reset(self) -> None:
        self.wrapper.told.append("reset")


class Derived(Wrapper):
    """Subclasses of a registered wrapper are found too."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from accumulate import _sync  # the registry has no public way to forget

    monkeypatch.setattr(_sync, "_registry", dict(_sync._registry))
    register(Wrapper, Control)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", [Wrapper, Derived])
def test_a_registered_wrapper_is_steered_at_any_depth(kind: type[Wrapper]) -> None:
    wrapped = kind(plain_net())
    model = nn.Sequential(nn.Identity(), wrapped)
    acc = Accumulator(model, 2)
    assert f"{kind.__name__} at model.1" in repr(acc)
    feed(acc, model, [data(0, 0), data(0, 1)])
    assert wrapped.told == ["pause", "end", "reduce", "end"]
    model.zero_grad()
    wrapped.told.clear()
    feed(acc, model, [data(0, 0)])
    acc.flush()
    feed(acc, model, [data(0, 0)])
    acc.reset()
    with no_sync(model):
        pass
    assert wrapped.told == ["pause", "end", "flush", "pause", "end", "reset", "pause", "end"]


@pytest.mark.usefixtures("registered")
def test_a_wrapper_that_did_not_reduce_is_an_error_at_the_boundary() -> None:
    from accumulate import AccumulateError

    wrapped = Wrapper(plain_net())
    acc = Accumulator(wrapped, 1)
    wrapped.reduces = False
    with pytest.raises(AccumulateError, match="reduced nothing"):
        feed(acc, wrapped, [data(0, 0)])
    assert not acc.is_boundary
    with pytest.raises(WindowError, match="reset"):
        feed(acc, wrapped, [data(0, 0)])


@pytest.mark.usefixtures("registered")
def test_every_control_is_told_that_the_block_ended_even_after_an_exception() -> None:
    wrapped = Wrapper(plain_net())
    acc = Accumulator(wrapped, 2)
    with pytest.raises(ZeroDivisionError), acc.step():
        raise ZeroDivisionError
    assert wrapped.told == ["pause", "end"]
    with pytest.raises(ZeroDivisionError), no_sync(wrapped):
        raise ZeroDivisionError
    assert wrapped.told == ["pause", "end"] * 2


def test_an_accumulator_that_nobody_holds_is_gone_and_so_is_its_model() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, index) for index in range(3)])
    seen, owner = weakref.ref(acc), weakref.ref(model)
    del acc
    gc.collect()
    assert seen() is None
    del model
    gc.collect()
    assert owner() is None


def test_two_accumulators_share_nothing() -> None:
    first, second = plain_net(1), plain_net(2)
    one, two = Accumulator(first, 2), Accumulator(second, 3)
    feed(one, first, [data(0, 0)])
    feed(two, second, [data(0, 0)])
    feed(one, first, [data(0, 1)])
    assert (one.is_boundary, two.is_boundary) == (True, False)
    matches(first, plain_net(1), [data(0, 0), data(0, 1)])
    feed(two, second, [data(0, 1), data(0, 2)])
    matches(second, plain_net(2), [data(0, index) for index in range(3)])


def test_after_close_the_model_trains_as_before_and_every_block_is_refused() -> None:
    model = plain_net()
    with Accumulator(model, 2) as acc:
        feed(acc, model, [data(0, 0), data(0, 1)])
    acc.close()
    with pytest.raises(WindowError, match="closed"), acc.step():
        pass
    model.zero_grad()
    loss_of(model, data(0, 2)).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    matches(model, plain_net(), [data(0, 2)])


def test_closing_in_mid_window_clears() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0)])
    acc.close()
    assert grads(model) == {}


def test_a_with_statement_that_drops_a_window_says_so() -> None:
    model = plain_net()
    with pytest.warns(UserWarning, match=r"1 micro-batch.*flush"), Accumulator(model, 2) as acc:
        feed(acc, model, [data(0, 0)])
    assert grads(model) == {}


def test_an_exception_in_a_with_statement_is_the_one_that_comes_out() -> None:
    model = plain_net()
    with pytest.raises(ZeroDivisionError), Accumulator(model, 2) as acc:
        feed(acc, model, [data(0, 0)])
        raise ZeroDivisionError
    assert grads(model) == {}


def test_reset_outside_a_window_keeps_a_closed_windows_gradient() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0), data(0, 1)])
    acc.reset()
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


def test_scale_is_backward_without_the_backward() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for index in range(2):
        with acc.step():
            loss = loss_of(model, data(0, index))
            acc.scale(loss, weight=index + 1).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    reference = plain_net()
    for index in range(2):
        (loss_of(reference, data(0, index)) * (index + 1) / 3).backward()  # type: ignore[no-untyped-call]  # torch's
    same(grads(model), grads(reference))


def test_options_of_backward_are_passed_on() -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    first = next(model.parameters())
    with acc.step():
        loss = loss_of(model, data(0, 0))
        acc.backward(loss, inputs=[first], retain_graph=True)
    assert list(grads(model)) == ["0.weight"]
    assert torch.autograd.grad(loss, [first])[0].shape == first.shape


def test_a_backward_outside_any_block_in_mid_window_is_reported_at_the_next_block() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(0, 0)])
    loss_of(model, data(0, 1)).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    with pytest.raises(WindowError, match=r"outside|changed"):
        feed(acc, model, [data(0, 2)])
    acc.reset()
    feed(acc, model, [data(0, index) for index in range(3)])
    matches(model, plain_net(), [data(0, index) for index in range(3)])


def test_batch_norm_in_windows_of_several_is_warned_about_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    with pytest.warns(UserWarning, match="BatchNorm"):
        acc = Accumulator(model, 2)
    feed(acc, model, [data(0, index) for index in range(4)])  # where a second warning would be an error
    feed(Accumulator(model, 1), model, [data(0, 0)])  # windows of one are what BatchNorm sees anyway
    model.eval()
    feed(Accumulator(model, 2), model, [data(0, 0)])
