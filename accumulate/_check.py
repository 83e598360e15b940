"""The proof for users that a window of micro-batches equals one big batch, on their own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from .checking.report import Report

__all__ = ["check"]


def check(
    model: nn.Module,
    loss_fn: Callable[..., Tensor | tuple[Tensor, float | Tensor]],
    batch: Sequence[Tensor],
    steps: int = 4,
) -> Report:
    """Whether ``steps`` micro-batches give your model the gradient of one big batch; if not, why not.

    ``loss_fn(model, *batch)`` returns a loss, or ``(loss, weight)`` as for ``backward``; ``batch`` is a tuple of
    tensors, split along their first dimension. Everything runs on copies, in float64 if the model can. Pass the module
    without its wrapper. The report has ``ok``, ``cause`` (a short string, None if ok), ``errors`` (the relative error
    of each parameter's gradient by name), ``ratio`` (accumulated over big batch, by least squares) and a readable
    ``str``.
    Raises ``ValueError`` or ``TypeError`` for arguments that cannot be checked, :class:`UnsupportedWrapperError`
    for a wrapped model.
    """
    from .checking.verdict import judge  # not at the top: most programs that import this library never check

    return judge(model, loss_fn, batch, steps)
