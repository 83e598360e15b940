"""What is wrong is refused at once: the right type of error, the user's value in it, the next action, and a
model unharmed.
"""

# ruff: noqa: E501 - the table of mistakes reads best with one row on one line

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accumulate import (
    AccumulateError,
    Accumulator,
    SyncControl,
    UnsupportedWrapperError,
    WindowError,
    no_sync,
    register,
)
from support.loops import data, feed, grads, loss_of, matches, plain_net
from support.oracle import Term


@dataclass(frozen=True)
class Bad:
    """One mistake: what is called with the model, the error's type, and what its message must contain."""

    name: str
    call: Callable[[nn.Module], object]
    error: type[Exception]
    says: tuple[str, ...]


class Stranger(nn.Linear):
    """A wrapper that nobody knows."""

    def no_sync(self) -> None: ...


class Abstract(SyncControl):
    """An adapter that implements nothing."""


class Concrete(Abstract):
    """One that implements everything."""

    groups = begin = end = finish = flush = reset = None  # type: ignore[assignment]  # never called


def inside(action: Callable[[Accumulator, Tensor], object]) -> Callable[[nn.Module], object]:
    """The mistake is made in a block, with a loss at hand."""

    def call(model: nn.Module) -> object:
        acc = Accumulator(model, 2)
        try:
            with acc.step():
                return action(acc, loss_of(model, data(0, 0)))
        finally:
            acc.reset()

    return call


def twice(model: nn.Module) -> object:
    acc = Accumulator(model, 2)
    with acc.step(), acc.step():
        pass
    return None


def again(model: nn.Module) -> object:
    acc = Accumulator(model, 2)
    block = acc.step()
    with block, block:
        pass
    return None


def mixed(first: Any, second: Any) -> Callable[[nn.Module], object]:
    def call(model: nn.Module) -> object:
        acc = Accumulator(model, 3)
        try:
            for weight in (first, second):
                with acc.step():
                    acc.backward(loss_of(model, data(0, 0)), weight=weight)
        finally:
            acc.reset()
        return None

    return call


def two_weights(acc: Accumulator, loss: Tensor) -> None:
    acc.backward(loss, weight=2, retain_graph=True)
    acc.backward(loss, weight=3)


STEPS = "steps"
NEGATIVE = "-1"
BAD = [
    Bad("steps 0", lambda m: Accumulator(m, 0), ValueError, (STEPS, "got 0", "at least 1")),
    Bad("steps -1", lambda m: Accumulator(m, -1), ValueError, (STEPS, "got -1", "at least 1")),
    Bad("steps 1.5", lambda m: Accumulator(m, 1.5), TypeError, (STEPS, "1.5", "int")),  # type: ignore[arg-type]  # the mistake
    Bad("steps True", lambda m: Accumulator(m, True), TypeError, (STEPS, "True", "int")),
    Bad("steps text", lambda m: Accumulator(m, "4"), TypeError, (STEPS, "'4'", "int")),  # type: ignore[arg-type]  # the mistake
    Bad("steps None", lambda m: Accumulator(m, None), TypeError, (STEPS, "None")),  # type: ignore[arg-type]  # the mistake
    Bad("steps later", lambda m: setattr(Accumulator(m), "steps", 0), ValueError, (STEPS, "0")),
    Bad("steps called", lambda m: feed(Accumulator(m, lambda i: 2.5), m, [data(0, 0)]), TypeError, (STEPS, "2.5")),  # type: ignore[arg-type, return-value]  # the mistake
    Bad("no module", lambda m: Accumulator("model"), TypeError, ("model", "'model'", "Module")),  # type: ignore[arg-type]  # the mistake
    Bad("no module in a list", lambda m: Accumulator([m, 3]), TypeError, ("3", "Module")),  # type: ignore[list-item]  # the mistake
    Bad("None", lambda m: Accumulator(None), TypeError, ("None", "Module")),  # type: ignore[arg-type]  # the mistake
    Bad("an empty list", lambda m: Accumulator([]), ValueError, ("empty", "at least one")),
    Bad("the same twice", lambda m: Accumulator([m, m]), ValueError, ("model[1]", "model[0]", "once")),
    Bad("a part twice", lambda m: Accumulator([m, m[0]]), ValueError, ("model[1]", "once")),  # type: ignore[index]  # a Sequential
    Bad("policy", lambda m: Accumulator(m, policy="fast"), ValueError, ("policy", "'fast'", "balanced")),
    Bad("group", lambda m: Accumulator(m, group=7), TypeError, ("group", "7", "ProcessGroup")),  # type: ignore[arg-type]  # the mistake
    Bad("boundary", lambda m: Accumulator(m).step(1), TypeError, ("boundary", "got 1", "None")),  # type: ignore[arg-type]  # the mistake
    Bad("weight -1", inside(lambda acc, loss: acc.backward(loss, weight=-1)), ValueError, ("weight", NEGATIVE)),
    Bad("weight nan", inside(lambda acc, loss: acc.backward(loss, weight=float("nan"))), ValueError, ("weight", "nan")),
    Bad("weight inf", inside(lambda acc, loss: acc.backward(loss, weight=float("inf"))), ValueError, ("weight", "inf")),
    Bad("weight vector", inside(lambda acc, loss: acc.backward(loss, weight=torch.ones(3))), ValueError, ("weight", "(3,)", "sum")),
    Bad("weight text", inside(lambda acc, loss: acc.backward(loss, weight="3")), TypeError, ("weight", "'3'")),  # type: ignore[arg-type]  # the mistake
    Bad("weight True", inside(lambda acc, loss: acc.backward(loss, weight=True)), TypeError, ("weight", "True")),
    Bad("weight list", inside(lambda acc, loss: acc.backward(loss, weight=[3])), TypeError, ("weight", "[3]")),  # type: ignore[arg-type]  # the mistake
    Bad("loss vector", inside(lambda acc, loss: acc.backward(loss.expand(4))), ValueError, ("loss", "(4,)", ".mean()")),
    Bad("loss detached", inside(lambda acc, loss: acc.backward(loss.detach())), ValueError, ("loss", "require grad", "detach")),
    Bad("loss number", inside(lambda acc, loss: acc.backward(0.5)), TypeError, ("loss", "0.5", "tensor")),  # type: ignore[arg-type]  # the mistake
    Bad("reduction", inside(lambda acc, loss: acc.backward(loss, 1, "max")), ValueError, ("reduction", "'max'", "mean")),
    Bad("sum without weight", inside(lambda acc, loss: acc.backward(loss, reduction="sum")), ValueError, ("sum", "weight=")),
    Bad("two weights", inside(two_weights), WindowError, ("2", "3", "same weight")),
    Bad("weighted, then not", mixed(2, None), WindowError, ("weight", "every")),
    Bad("not, then weighted", mixed(None, 2), WindowError, ("weight=2.0", "every")),
    Bad("zero among unweighted", mixed(None, 0), WindowError, ("weight=0", "weight=1")),
    Bad("outside", lambda m: Accumulator(m).backward(loss_of(m, data(0, 0))), WindowError, ("backward()", "acc.step()")),
    Bad("scale outside", lambda m: Accumulator(m).scale(loss_of(m, data(0, 0))), WindowError, ("scale()", "acc.step()")),
    Bad("nested", twice, WindowError, ("step()", "leave that block")),
    Bad("one block twice", again, WindowError, ("step()",)),
    Bad("flush inside", inside(lambda acc, loss: acc.flush()), WindowError, ("flush()", "after the block")),
    Bad("reset inside", inside(lambda acc, loss: acc.reset()), WindowError, ("reset()", "after the block")),
    Bad("close inside", inside(lambda acc, loss: acc.close()), WindowError, ("block",)),
    Bad("clip inside", inside(lambda acc, loss: acc.clip_grad_norm_(1.0)), WindowError, ("clip_grad_norm_()",)),
    Bad("clip off boundary", lambda m: Accumulator(m, 2).clip_grad_norm_(1.0), WindowError, ("clip_grad_norm_", "is_boundary")),
    Bad("no optimizer", lambda m: Accumulator(m).optimizer_step(), TypeError, ("optimizer",)),
    Bad("stranger", lambda m: Accumulator(nn.Sequential(m, Stranger(8, 8))), UnsupportedWrapperError,
        ("model.1", "Stranger", "DistributedDataParallel", "register")),
    Bad("stranger in no_sync", lambda m: no_sync(Stranger(8, 8)).__enter__(), UnsupportedWrapperError, ("Stranger", "register")),
    Bad("control", lambda m: register(Stranger, Stranger), TypeError, ("Stranger", "SyncControl")),  # type: ignore[arg-type]  # the mistake
    Bad("abstract control", lambda m: register(Stranger, Abstract), TypeError, ("Abstract", "flush", "finish")),  # type: ignore[type-abstract]  # the mistake
    Bad("wrapper", lambda m: register(3, Concrete), TypeError, ("wrapper", "3")),  # type: ignore[arg-type]  # the mistake
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_mistake_is_named_with_its_value_and_leaves_the_model_unharmed(bad: Bad) -> None:
    model = plain_net()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(bad.error) as caught:
        bad.call(model)
    message = str(caught.value)
    assert [text for text in bad.says if text not in message] == [], message
    assert len(message) < 500
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    model.zero_grad()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(0, 0), data(0, 1)])
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_max_norm_that_is_none_is_refused(max_norm: float) -> None:
    model = plain_net()
    acc = Accumulator(model)
    feed(acc, model, [data(0, 0)])
    before = grads(model)
    with pytest.raises(ValueError, match=str(max_norm)):
        acc.clip_grad_norm_(max_norm)
    assert all(torch.equal(before[name], value) for name, value in grads(model).items())


def test_a_block_of_another_thread_is_an_error() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with acc.step():
                pass
        except WindowError as error:
            caught.append(error)

    with acc.step():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        acc.backward(loss_of(model, data(0, 0)))
    assert "another thread" in str(caught[0])
    feed(acc, model, [data(0, 1)])
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


def test_one_handler_catches_all_that_the_library_raises_about_itself() -> None:
    assert issubclass(WindowError, AccumulateError)
    assert issubclass(UnsupportedWrapperError, AccumulateError)
    assert issubclass(WindowError, RuntimeError)
    assert issubclass(UnsupportedWrapperError, TypeError)


def test_a_weight_on_the_device_is_never_read_on_the_host() -> None:
    class Unreadable(torch.Tensor):
        """A tensor that refuses to be looked at."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("item", "__bool__", "__float__", "__int__", "tolist", "cpu", "numpy"):
                raise AssertionError(f"{func.__name__} reads a device tensor on the host")
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's

    model = plain_net()
    acc = Accumulator(model, 2)
    for index, weight in enumerate((2.0, 5.0)):
        with acc.step():
            loss = loss_of(model, data(0, index))
            acc.backward(loss, weight=torch.tensor(weight).as_subclass(Unreadable))
    found = {name: value.as_subclass(torch.Tensor) for name, value in grads(model).items()}
    terms = [Term(*data(0, index)[:2], weight) for index, weight in enumerate((2.0, 5.0))]
    for parameter, value in zip(model.parameters(), found.values(), strict=True):
        parameter.grad = value.clone()
    matches(model, plain_net(), terms)
