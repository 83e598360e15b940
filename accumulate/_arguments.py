"""What users pass, checked once, with errors that carry the value and the next action."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from ._errors import AccumulateError
from ._scaling import precise
from ._version import __version__

__all__ = [
    "alike",
    "as_models",
    "check_batches",
    "check_count",
    "check_loss",
    "check_policy",
    "check_scaler",
    "check_steps",
    "check_verify",
    "check_weight",
    "is_zero",
    "refuse_optimizer_in_backward",
]

POLICIES = ("memory", "balanced", "speed")
PATIENCE = 300.0
"""Seconds that ``verify=True`` waits for the other ranks."""


def as_models(model: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The models by the name that messages call them: "model", or "model[0]", "model[1]", ..."""
    if isinstance(model, nn.Module):
        return {"model": model}
    given: object = model  # what it is, not what its annotation promises
    if not isinstance(given, Sequence) or not all(isinstance(each, nn.Module) for each in given):
        raise TypeError(f"model must be an nn.Module or a list of them, got {model!r}")
    if not model:
        raise ValueError("model is an empty list; pass at least one nn.Module")
    owner: dict[int, int] = {}
    for index, each in enumerate(model):
        for part in (*each.modules(), *each.parameters()):
            if owner.setdefault(id(part), index) != index:
                raise ValueError(
                    f"model[{index}] and model[{owner[id(part)]}] share a {type(part).__name__}, whose gradient would "
                    "be scaled twice. Pass each module once, and models that share parameters as one module."
                )
    return {f"model[{index}]": each for index, each in enumerate(model)}


def check_steps(steps: object) -> int:
    """The number of micro-batches in a window."""
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral):
        raise TypeError(f"steps must be an int >= 1 or a callable of the update index that returns one, got {steps!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}; steps=1 means no accumulation")
    return int(steps)


def check_setting(steps: int | Callable[[int], int]) -> int | Callable[[int], int]:
    """``steps`` as the user sets it; a callable is first called when a window opens."""
    return steps if callable(steps) else check_steps(steps)


def check_policy(policy: str) -> str:
    """The policy, if there is one of that name."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose from {', '.join(map(repr, POLICIES))}")
    return policy


def alike(steps: object, policy: str, scaler: GradScaler | None, wrappers: Sequence[str]) -> dict[str, object]:
    """What has to be the same on all ranks, by the names that messages give it."""
    return {
        "steps": "a callable" if callable(steps) else steps,
        "policy": policy,
        "wrappers": wrappers,
        "versions": f"accumulate {__version__}, torch {torch.__version__}",
        "scaler": None if scaler is None else f"{type(scaler).__name__} at {scaler.get_scale()}",
    }


def check_verify(verify: float) -> float:
    """How many seconds a rank waits for the others at a boundary; 0 for never looking."""
    if verify is True:
        return PATIENCE
    if not isinstance(verify, numbers.Real):
        raise TypeError(f"verify must be True, False or the seconds to wait for other ranks, got {verify!r}")
    if not 0 <= verify < math.inf:
        raise ValueError(f"verify must be a finite number of seconds, at least 0, got {verify!r}")
    return float(verify)


def check_batches(iterable: object, weight: object, last: str) -> None:
    """The arguments of ``batches()``, before anything is pulled."""
    if not (hasattr(type(iterable), "__iter__") or hasattr(type(iterable), "__getitem__")):
        raise TypeError(f"batches() needs an iterable of batches, got {iterable!r}")
    if weight is not None and not callable(weight):
        raise TypeError(f"weight must be a function of a batch that counts its items, or None, got {weight!r}")
    if last not in ("close", "carry"):
        raise ValueError(f"last must be 'close' or 'carry', got {last!r}")
    if last == "carry" and weight is not None:
        raise ValueError(
            "weight=fn counts a window ahead, and with last='carry' the rest of a window is not known yet. Use "
            "last='close', or pass weights to backward() instead."
        )


def check_scaler(scaler: GradScaler | None) -> GradScaler | None:
    """The scaler if it scales; a disabled one is none."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler (or a ShardedGradScaler) or None, got {scaler!r}")
    return scaler if scaler is not None and scaler.is_enabled() else None


def check_boundary(boundary: bool | None) -> bool | None:
    """True, False or None; nothing that would have to be read from a device."""
    if boundary is not None and not isinstance(boundary, bool):
        raise TypeError(f"boundary must be True, False or None (let the count decide), got {boundary!r}")
    return boundary


def check_loss(loss: Tensor) -> None:
    """Raise unless ``loss`` is a scalar that backward can start from."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {loss!r}")
    if loss.numel() != 1:
        raise ValueError(
            f"loss must be a scalar, got shape {tuple(loss.shape)}; reduce it with .mean() or .sum() first"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"loss {loss!r} does not require grad, so backward has nowhere to go; do not detach it, and compute it "
            "outside no_grad()"
        )


def check_weight(weight: float | Tensor | None, reduction: str) -> float | Tensor | None:
    """The weight as a float or a 0-dim tensor; raise for what cannot be a count. A tensor is not read."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if weight is None:
        if reduction == "sum":
            raise ValueError("reduction='sum' needs weight=, the number of items in the sum, to divide by")
        return None
    return check_count(weight)


def check_count(weight: object) -> float | Tensor:
    """A number of items, or the TypeError or ValueError for what is none."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight must be one number, got a tensor of shape {tuple(weight.shape)}; pass its sum")
        if weight.is_complex():
            raise TypeError(f"weight must be a real number, got a tensor of dtype {weight.dtype}")
        return weight.detach().reshape(()).to(precise(weight.device))  # an integer count times a scale would be float32
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(f"weight must be a number or a 0-dim tensor, got {weight!r}")
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight must be finite and at least 0, got {weight!r}; it counts the items in the loss")
    return float(weight)


def is_zero(weight: float | Tensor | None) -> bool:
    """Whether the weight is the number 0, which drops a micro-batch; a tensor is never read."""
    return isinstance(weight, float) and weight == 0.0


def refuse_optimizer_in_backward(named: Iterable[tuple[str, nn.Parameter]], steps: int) -> None:
    """Raise if a parameter has a hook that runs after each accumulation: with steps > 1 it would see partial sums."""
    if steps == 1:
        return
    for name, param in named:
        if getattr(param, "_post_accumulate_grad_hooks", None) or getattr(param, "_in_backward_optimizers", None):
            raise AccumulateError(
                f"parameter {name} has a post-accumulate-grad hook (an optimizer inside backward?), which would act on "
                f"each of the {steps} micro-batches of a window instead of on their gradient. Remove the hook and step "
                "the optimizer when is_boundary is true, or use steps=1."
            )
