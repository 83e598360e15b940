"""Whatever the data does, on real ranks: random numbers of micro-batches, lengths, weights, drops and ends of loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn

from accumulate import Accumulator
from distributed.arrangements import BY_NAME
from support.counting import Collectives
from support.loops import data, equal_on_ranks, loss_of, rank
from support.oracle import Term, same, train
from support.ranks import Pool

LR = 0.1


@dataclass(frozen=True)
class Scenario:
    """What two ranks are given: for each epoch the weights of each rank's micro-batches."""

    epochs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    steps: int
    last: Literal["close", "carry"]
    mode: Literal["none", "late", "ahead"]
    sized: bool

    def items(self, rank: int, epoch: int) -> list[Term]:
        weights = self.epochs[epoch][rank]
        return [data(rank, 100 * epoch + i, 1 + i % 3, self.weight(weight)) for i, weight in enumerate(weights)]

    def weight(self, drawn: float) -> float:
        """Without weights each micro-batch counts 1."""
        return 1.0 if self.mode == "none" else drawn

    def windows(self) -> list[list[Term]]:
        """All micro-batches of each window that is closed, on both ranks."""
        windows: list[list[Term]] = [[]]
        held = 0
        for epoch in range(len(self.epochs)):
            every = [self.items(r, epoch) for r in range(2)]
            for index in range(max(map(len, every))):
                windows[-1] += [mine[index] for mine in every if index < len(mine)]
                held += 1
                ends = self.last == "close" and index + 1 == max(map(len, every))
                if held == self.steps or ends:
                    windows.append([])
                    held = 0
        return windows[:-1] if held or not windows[-1] else windows


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    mode: Literal["none", "late", "ahead"] = draw(st.sampled_from(["none", "late", "ahead"]))
    weights = st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=1, max_size=7).map(tuple)
    epochs = draw(st.lists(st.tuples(weights, weights), min_size=1, max_size=3))
    last: Literal["close", "carry"] = "close" if mode == "ahead" else draw(st.sampled_from(["close", "carry"]))
    return Scenario(tuple(epochs), draw(st.integers(1, 4)), last, mode, draw(st.booleans()))


def each(items: Iterable[Term]) -> Iterator[Term]:
    yield from items


def loop(scenario: Scenario, name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, scenario.steps)
    expected, final = train(row.seed(), scenario.windows(), LR)
    found: list[dict[str, Tensor]] = []
    ahead: Any = (lambda term: term.weight) if scenario.mode == "ahead" else None
    with Collectives() as seen:
        for epoch in range(len(scenario.epochs)):
            mine = scenario.items(rank(), epoch)
            for term in acc.batches(mine if scenario.sized else each(mine), weight=ahead, last=scenario.last):
                with acc.step():
                    acc.backward(loss_of(model, term), weight=None if scenario.mode == "none" else term.weight)
                if acc.is_boundary:
                    found.append(row.gradients(model))
                    update(model)
    sent = [f"{entry.kind} {entry.numel}" for entry in seen.log]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, sent)
    assert every[0] == every[1]
    compare(found, expected)
    if acc.position == 0:
        parameters = row.parameters(model)
        assert parameters.keys() == final.keys()
        same(parameters, final, 1e-9)


def update(model: nn.Module) -> None:
    """Plain SGD, by hand; the gradients are cleared."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(LR * parameter.grad)
    model.zero_grad()


def compare(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected)
    for gradients, oracle in zip(found, expected, strict=True):
        if any(bool(g.any()) for g in oracle.values()):
            same(gradients, oracle, 1e-9)
            equal_on_ranks(gradients)
        else:  # a window of total weight 0
            assert not any(bool(g.any()) for g in gradients.values())


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1-full"])
def test_every_stream_gives_the_oracles_gradients_and_parameters(name: str, ranks: Callable[[int], Pool]) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(scenarios())
    def check(scenario: Scenario) -> None:
        ranks(2).run(loop, scenario, name)

    check()
