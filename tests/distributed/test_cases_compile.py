"""Case 30: compiled models are found, are not compiled again because of the library, and inductor agrees with
the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from accumulate import Accumulator
from distributed.arrangements import BY_NAME, ddp
from support.counting import Collectives
from support.loops import data, everyone, feed, matches, rank
from support.ranks import on_ranks


class Backend:
    """aot_eager (or another backend) that counts what it is asked to compile."""

    def __init__(self, name: str) -> None:
        from torch._dynamo import lookup_backend

        self.inner: Callable[..., Any] = lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.inner(graph, inputs)


def seed() -> nn.Module:
    """A model of the tests' own: dynamo skips the forward of torch's own containers after a graph break."""
    return BY_NAME["ddp"].seed()


def build(kind: str, backend: Backend) -> nn.Module:
    def compiled(model: nn.Module) -> nn.Module:
        return cast("nn.Module", torch.compile(model, backend=backend))

    if kind == "compile(ddp)":
        return compiled(ddp(seed()))
    if kind == "ddp(compile)":
        return ddp(compiled(seed()))
    from torch.distributed.fsdp import fully_shard

    return compiled(cast("nn.Module", fully_shard(seed())))


def five_windows(kind: str, backend: Backend) -> tuple[list[int], list[int]]:
    """Graphs compiled after each window, and reductions in each backward."""
    model = build(kind, backend)
    acc, graphs, reductions = Accumulator(model, 2), [], []
    assert "wrappers=[none]" not in repr(acc)
    for window in range(5):
        indices = range(2 * window, 2 * window + 2)
        for index in indices:
            with acc.step():
                x, y, _ = data(rank(), index)
                loss = (model(x) - y).square().mean()
                with Collectives() as seen:
                    acc.backward(loss)
            reductions.append(len(seen.reductions))
        assert acc.is_boundary
        matches(model, seed(), everyone(indices))
        model.zero_grad()
        graphs.append(backend.graphs)
    return graphs, reductions


@on_ranks(2)
@pytest.mark.parametrize("kind", ["compile(ddp)", "ddp(compile)", "compile(fully_shard)"])
def test_case_30_found_and_not_compiled_again_after_the_second_window(kind: str) -> None:
    graphs, reductions = five_windows(kind, Backend("aot_eager"))
    assert reductions == [0, 1] * 5
    assert graphs[1] > 0
    assert graphs[1:] == [graphs[1]] * 4


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("kind", ["compile(ddp)", "ddp(compile)"])
def test_case_30_inductor(kind: str) -> None:
    graphs, reductions = five_windows(kind, Backend("inductor"))
    assert reductions == [0, 1] * 5
    assert graphs[1] > 0
    assert graphs[1:] == [graphs[1]] * 4


@on_ranks(2)
def test_case_30_a_user_who_compiles_a_whole_step_function() -> None:
    model = ddp(seed())
    backend = Backend("aot_eager")
    step = torch.compile(lambda x, y: (model(x) - y).square().mean(), backend=backend)
    acc, graphs = Accumulator(model, 2), []
    for window in range(4):
        indices = range(2 * window, 2 * window + 2)
        for index in indices:
            with acc.step():
                acc.backward(step(*data(rank(), index)[:2]))
        matches(model, seed(), everyone(indices))
        model.zero_grad()
        graphs.append(backend.graphs)
    assert graphs[2:] == [graphs[2]] * 2


@on_ranks(1)
def test_a_compiled_model_without_wrapper() -> None:
    model = cast("nn.Module", torch.compile(seed(), backend="aot_eager"))
    acc = Accumulator(model, 3)
    feed(acc, model, [data(0, index) for index in range(3)])
    matches(model, seed(), everyone(range(3)))
