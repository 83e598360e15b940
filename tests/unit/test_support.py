"""The oracle and the counter are right by arithmetic that fits in the head, before anything is measured against
them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.counting import Collective
from support.oracle import Term, gradient, same, train


class Times(nn.Module):
    """``w * x``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def term(x: float, weight: float = 1.0) -> Term:
    return Term(torch.tensor([x]), torch.tensor([0.0]), weight)


def product(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def test_the_oracle_weighs_what_the_formula_weighs() -> None:
    found = gradient(Times(), [term(3.0, 1.0), term(5.0, 3.0)], loss=product)
    assert found["w"].item() == (1 * 3 + 3 * 5) / 4
    assert found["w"].dtype is torch.float64


def test_the_oracle_trains() -> None:
    gradients, parameters = train(Times(), [[term(3.0)], [term(1.0), term(2.0)]], 0.5, loss=product)
    assert [one["w"].item() for one in gradients] == [3.0, 1.5]
    assert parameters["w"].item() == 1.0 - 0.5 * 4.5


def test_the_comparison_refuses_to_compare_nothing() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    same({"a": ones}, {"a": ones.clone()})
    for actual, expected in (({}, {}), ({"a": zeros}, {"a": zeros}), ({"b": ones}, {"a": ones}), ({}, {"a": ones})):
        with pytest.raises(AssertionError):
            same(actual, expected)
    with pytest.raises(AssertionError, match="relative"):
        same({"a": ones * 1.001}, {"a": ones})
    with pytest.raises(AssertionError, match="relative"):
        same({"a": ones * float("nan")}, {"a": ones})
    with pytest.raises(AssertionError, match="instead of"):
        same({"a": torch.ones(3)}, {"a": ones})


@pytest.mark.parametrize(
    ("kind", "numel", "dtype", "is_reduction"),
    [
        ("allreduce", 280, torch.float64, True),
        ("reduce_scatter_base", 280, torch.bfloat16, True),
        ("allreduce", 2, torch.float64, False),  # a sum of weights
        ("allreduce", 280, torch.int32, False),  # DDP's map of used parameters
        ("broadcast", 280, torch.float32, False),  # a buffer
        ("allgather_base", 280, torch.float32, False),
    ],
)
def test_what_counts_as_a_gradient_reduction(kind: str, numel: int, dtype: torch.dtype, is_reduction: bool) -> None:
    assert Collective(kind, numel, dtype).is_gradient_reduction is is_reduction
