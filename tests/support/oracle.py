"""What the gradient must be: the formula of the library, computed plainly by one process in float64.

    g = sum over ranks r and micro-batches i of w_ri * grad(l_ri), divided by the sum of w_ri      (no weight
    given: w_ri = 1)

Nothing here knows windows that stay open, wrappers or ranks that talk: a window is a list of terms, all ranks'
together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Term", "deviation", "gradient", "mean_square", "same", "train"]

Forward = Callable[[nn.Module, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Term(NamedTuple):
    """One micro-batch of one rank, and what it counts for."""

    x: Tensor
    y: Tensor
    weight: float = 1.0


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss of most tests: a mean over every element."""
    return (output - target).square().mean()


def call(model: nn.Module, x: Tensor) -> Tensor:
    """The forward of most models."""
    output = model(x)
    assert isinstance(output, Tensor)
    return output


def gradient(
    model: nn.Module, terms: Iterable[Term], forward: Forward = call, loss: Loss = mean_square
) -> dict[str, Tensor]:
    """The gradient of one window by parameter name, zero for a total weight of 0; ``model`` is not touched.

    Parameters without a gradient are left out.
    """
    model = copy.deepcopy(model).double()
    model.zero_grad()
    total, objective = 0.0, torch.zeros((), dtype=torch.float64)
    for x, y, weight in terms:
        objective = objective + weight * loss(forward(model, x.double()).double(), y.double())
        total += weight
    (objective / total if total else 0 * objective).backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: nn.Module,
    windows: Iterable[Sequence[Term]],
    lr: float,
    forward: Forward = call,
    loss: Loss = mean_square,
    keep: tuple[str, ...] = (),
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Plain SGD, one update per window: the gradient of each window, and the parameters at the end.

    Parameters whose names begin with one of ``keep`` are not updated.
    """
    model = copy.deepcopy(model).double()
    gradients = []
    for terms in windows:
        found = gradient(model, terms, forward, loss)
        gradients.append(found)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found and not name.startswith(keep):
                    parameter.sub_(lr * found[name])
    return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def deviation(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected value."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    size = float(expected.abs().max())
    difference = float((actual - expected).abs().max())
    return difference / size if size > 0 else difference


def same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Assert that both hold the same names, at least one, and equal tensors, of which at least one is not zero."""
    assert expected, "there is nothing to compare"
    assert sorted(actual) == sorted(expected)
    assert any(bool(t.any()) for t in expected.values()), "everything expected is zero"
    wrong = {name: deviation(actual[name], expected[name]) for name in expected}
    wrong = {name: value for name, value in wrong.items() if not value <= tolerance}
    assert not wrong, f"relative differences above {tolerance:g}: {wrong}"
