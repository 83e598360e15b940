"""Nothing between entering a block and the end of a window reads a device tensor on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumulate import Accumulator
from distributed.arrangements import BY_NAME
from support.loops import data, loss_of, plain_net, rank
from support.oracle import Term
from support.ranks import on_ranks

READING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")


class NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
    """Raises where a value of a tensor would have to reach Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.__name__.partition(".")[0] in READING:
            raise AssertionError(f"{func} reads a tensor on the host")
        run: Callable[..., object] = func
        return run(*args, **(kwargs or {}))


def test_the_mode_notices_each_way_to_read() -> None:
    value = torch.ones(())
    for read in (Tensor.item, float, int, bool, lambda t: torch.equal(t, t)):
        with pytest.raises(AssertionError, match="on the host"), NoReading():
            read(value)


def endless(count: int) -> Iterator[Term]:
    for index in range(count):
        yield data(rank(), index, weight=float(1 + index % 3))


def windows(model: nn.Module, mode: str) -> int:
    acc = Accumulator(model, 3)
    closed = 0
    ahead: Any = (lambda term: torch.tensor(term.weight)) if mode == "ahead" else None
    loop = acc.batches(endless(8), weight=ahead)
    while (term := next(loop, None)) is not None:
        weight = None if mode == "none" else torch.tensor(term.weight if term.weight < 3 else 0.0)
        if mode == "ahead":
            weight = torch.tensor(term.weight)
        with NoReading():
            with acc.step():
                acc.backward(loss_of(model, term), weight=weight)
            if acc.is_boundary:
                _ = acc.loss
        if acc.is_boundary:
            assert any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)
            model.zero_grad()
            closed += 1
    return closed


@pytest.mark.parametrize("mode", ["none", "late", "ahead"])
def test_a_plain_model(mode: str) -> None:
    assert windows(plain_net(), mode) == 3


@on_ranks(2)
@pytest.mark.parametrize("mode", ["none", "late", "ahead"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_wrapped_model(name: str, mode: str) -> None:
    assert windows(BY_NAME[name].build(), mode) == 3
