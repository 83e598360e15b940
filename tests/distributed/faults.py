"""What can go wrong in a training loop, as things to do to an open window; the fault tests and the soak share them.

A fault begins with an open window of some micro-batches, and leaves it to the caller to go on. It is the same on every
rank, or hits rank 0 alone where the others have nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from accumulate import Accumulator
from distributed.arrangements import Arrangement, Net
from support.oracle import Term, mean_square

__all__ = [
    "BLOCK_FAULTS",
    "EXCEPTIONS",
    "TRAP",
    "Fragile",
    "Trap",
    "backward",
    "flags",
    "goes_off",
    "hooks",
    "run",
    "steps_badly",
]

EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "an ordinary exception": lambda: ZeroDivisionError("a fault"),
    "Ctrl-C": KeyboardInterrupt,
    "out of memory": lambda: torch.OutOfMemoryError("a fault"),
}
BLOCK_FAULTS = ("before forward", "in forward", "after forward", "in backward", "after backward")


@dataclass
class Trap:
    """Where the fragile model raises next, and what."""

    place: str | None = None
    error: Callable[[], BaseException] = ZeroDivisionError

    def check(self, place: str) -> None:
        """Raise if this is the place."""
        if self.place == place:
            raise self.error()


TRAP = Trap()


class Break(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        TRAP.check("in backward")
        return grads[0]


class Fragile(Net):
    """Raises between its two blocks when the trap is set, so that one unit is behind and one before the fault."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.cat([x, x.square()], dim=1))
        TRAP.check("in forward")
        if TRAP.place == "in backward":
            x = cast("Tensor", Break.apply(x))  # type: ignore[no-untyped-call]  # torch does not annotate it
        return cast("Tensor", self.blocks[1](x))


def run(acc: Accumulator, row: Arrangement, model: Any, term: Term, weighted: bool = False) -> None:
    """One micro-batch, in which a trap may go off."""
    TRAP.check("before the block")
    with acc.step():
        TRAP.check("before forward")
        loss = mean_square(row.forward(model, term.x).double(), term.y)
        TRAP.check("after forward")
        acc.backward(loss, weight=term.weight if weighted else None)
        TRAP.check("after backward")


@contextmanager
def goes_off(place: str, error: Callable[[], BaseException]) -> Iterator[None]:
    """Set the trap; what is inside must raise that error."""
    TRAP.place, TRAP.error = place, error
    try:
        with pytest.raises(type(error())):
            yield
    finally:
        TRAP.place = None


def steps_badly(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let the optimizer's next step raise, before it changes anything."""

    def fail(*args: object) -> None:
        handle.remove()
        raise ZeroDivisionError("a fault")

    handle = optimizer.register_step_pre_hook(fail)
    return optimizer


def backward(loss: Tensor) -> None:
    """Without the library."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


def flags(model: nn.Module) -> list[object]:
    """What torch reads when it decides whether to reduce, for every wrapper in the model."""
    found: list[object] = []
    for module in model.modules():
        if hasattr(module, "require_backward_grad_sync"):
            found.append((module.require_backward_grad_sync, module.static_graph))
        elif hasattr(type(module), "_get_fsdp_state"):
            group: Any = cast("Any", module)._get_fsdp_state()._fsdp_param_group
            found.append(group and (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward))
        elif hasattr(module, "_sync_gradients"):
            found.append(module._sync_gradients)
    return found


def hooks(model: nn.Module) -> int:
    """How many hooks hang on the model's modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
