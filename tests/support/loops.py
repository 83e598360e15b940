"""Small pieces of a user's loop, and of looking at its result, for tests that run on one process or on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.oracle import Term, gradient, mean_square, same

__all__ = ["data", "equal_on_ranks", "everyone", "feed", "grads", "loss_of", "matches", "plain_net", "rank", "whole"]


def rank() -> int:
    """This rank; 0 without ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def plain_net(seed: int = 1, inputs: int = 8, outputs: int = 8) -> nn.Module:
    """A small float64 model, equal wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def data(rank: int, index: int, n: int = 3, weight: float = 1.0) -> Term:
    """Micro-batch ``index`` of a rank: ``n`` samples."""
    draw = torch.Generator().manual_seed(1000 * rank + index)
    x = torch.randn(n, 8, dtype=torch.float64, generator=draw)
    return Term(x, torch.randn(n, 8, dtype=torch.float64, generator=draw), weight)


def everyone(indices: Iterable[int], n: int = 3) -> list[Term]:
    """Those micro-batches of every rank."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return [data(r, i, n) for i in indices for r in range(world)]


def whole(terms: Sequence[Term]) -> Term:
    """All samples in one batch, which is what the micro-batches came from."""
    return Term(torch.cat([t.x for t in terms]), torch.cat([t.y for t in terms]))


def loss_of(model: nn.Module, term: Term) -> Tensor:
    """The mean loss of one micro-batch."""
    return mean_square(model(term.x), term.y)


def feed(
    acc: Any, model: nn.Module, terms: Iterable[Term], weighted: bool = False, boundary: bool | None = None
) -> None:
    """One ``step()`` block for each micro-batch, without any update."""
    for term in terms:
        with acc.step(boundary):
            acc.backward(loss_of(model, term), weight=term.weight if weighted else None)


_INSERTED = {"module", "_orig_mod", "_fsdp_wrapped_module"}


def grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by the names of the unwrapped model; DTensors are gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is not None:
            full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            found[".".join(part for part in name.split(".") if part not in _INSERTED)] = full
    return found


def equal_on_ranks(values: dict[str, Tensor]) -> None:
    """Assert that every rank holds exactly these tensors."""
    assert values, "there is nothing to compare"
    for name, value in values.items():
        every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(every, value.contiguous())
        assert all(torch.equal(value, other) for other in every), f"{name} differs between ranks"


def matches(model: nn.Module, seed: nn.Module, terms: Sequence[Term], tolerance: float = 1e-10) -> None:
    """Assert REF and EQ: the model's gradients are the oracle's of ``seed`` over these terms, on every rank alike."""
    found = grads(model)
    same(found, gradient(seed, terms), tolerance)
    if dist.is_initialized():
        equal_on_ranks(found)
