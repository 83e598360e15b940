"""The one formula of this library, as pure functions.

R ranks; rank r's window holds micro-batches i with losses l_ri, each a mean over w_ri items:

    g  =  sum_r sum_i  w_ri * grad(l_ri)   /   sum_r sum_i  w_ri            (no weight given: w_ri = 1)

which is the gradient of the mean loss over every item of the window, on all ranks together. The future is
unknown while a window is open, so each loss is multiplied by ``scale * w_ri`` with a provisional ``scale``
that is equal on all ranks, the wrapper averages over the ranks, and the closed window is multiplied once by

    correction  =  R / (scale * sum_r sum_i w_ri)

With ``scale = 1 / steps`` and a full window without weights that is exactly 1, and nothing is done.

Everything here takes floats or 0-dim tensors alike; a tensor is never read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["correction", "counted_scale", "precise", "scaled_loss", "window_scale"]


def precise(device: torch.device) -> torch.dtype:
    """The dtype in which weights are summed: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def scaled_loss(loss: Tensor, scale: float | Tensor, weight: float | Tensor | None, reduction: str) -> Tensor:
    """``loss`` as a term of the window's sum: times ``scale``, and times ``weight`` if it is a mean.

    A weight of zero makes the term exactly zero, whatever the loss is; a tensor is compared on its device.
    """
    if isinstance(weight, float) and weight == 0.0:
        return torch.where(torch.zeros((), dtype=torch.bool, device=loss.device), loss, torch.zeros_like(loss))
    factor = scale if weight is None or reduction == "sum" else scale * weight
    if isinstance(factor, Tensor):
        factor = factor.to(device=loss.device, dtype=loss.dtype)
    term = loss if isinstance(factor, float) and factor == 1.0 else loss * factor
    if isinstance(weight, Tensor):
        term = torch.where(weight.to(loss.device) == 0, torch.zeros_like(term), term)
    return term


def window_scale(steps: int, mean_weight: float | Tensor | None) -> float | Tensor:
    """The provisional scale of a window: 1 over what its weights are expected to sum to on one rank."""
    return 1.0 / steps if mean_weight is None else 1.0 / (steps * mean_weight)


def counted_scale(ranks: int, total: Tensor) -> Tensor:
    """The exact scale of a window whose weights have been summed ahead; for a sum of 0 any that further losses bear."""
    return torch.where(total > 0, ranks / total, torch.ones_like(total))


def correction(ranks: int, scale: float | Tensor, total: Tensor) -> Tensor:
    """The factor that makes a closed window exact; 0 for a window of total weight 0."""
    return torch.where(total > 0, ranks / (scale * total), torch.zeros_like(total))
