"""What a saved state looks like, so that nothing else is ever loaded: it may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._scaling import precise
from ._tally import Tally

__all__ = ["VERSION", "check_gradients", "check_state", "copied", "describe", "differences", "moved"]

VERSION = 1
"""Of the format. A state of another version is refused: it may hold what this one does not know."""

Fields = Mapping[str, tuple[type, ...]]
_ABSENT = type(None)
_STATE: Fields = {
    "version": (int,),
    "rank": (int,),
    "ranks": (int,),
    "updates": (int,),
    "micro_steps": (int,),
    "is_boundary": (bool,),
    "mean_weight": (float, Tensor, _ABSENT),
    "grad_norm": (Tensor, _ABSENT),
    "closed": (dict, _ABSENT),
    "open": (dict, _ABSENT),
    "orders": (dict,),
    "fits": (dict, _ABSENT),
    "gradients": (dict, _ABSENT),
}
_FITS: Fields = {
    "steps": (int,),
    "policy": (str,),
    "scaler": (str, _ABSENT),
    "wrappers": (list,),
    "parameters": (dict,),
}
_WINDOW: Fields = {name.lstrip("_"): types for name, types in Tally.SAVED.items()}
_DIMENSIONS = {"losses": 1, "means": 1, "counted": 1}
"""Of the tensors; all others hold one number."""


def check_state(state: object) -> dict[str, Any]:
    """``state`` if it has the form that ``state_dict`` gives it; raises ``TypeError`` or ``ValueError`` if not."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be what Accumulator.state_dict() returned, got a {type(state).__name__}")
    if state.get("version") != VERSION:
        raise ValueError(f"state has the version {state.get('version')!r}, and this library reads version {VERSION}")
    checked = _check(state, _STATE, "state")
    for name in ("open", "closed"):
        if checked[name] is not None:
            _check_window(checked[name], f"state[{name!r}]")
    if (checked["fits"] is None) != (checked["gradients"] is None):
        raise ValueError("state has only one of 'fits' and 'gradients', which belong together")
    if checked["open"] is not None and (checked["gradients"] is None or checked["is_boundary"]):
        raise ValueError("state has an open window without its gradients, or at a boundary, where none is open")
    if checked["open"] is None and checked["gradients"] is not None and not checked["is_boundary"]:
        raise ValueError("state has gradients of no window: none is open, and it is not at a boundary")
    for name, order in checked["orders"].items():
        if type(order) is not list or not all(type(index) is int for index in order):
            raise TypeError(f"state['orders'][{name!r}] must be a list of int, got {order!r}")
    if checked["fits"] is not None:
        _check(checked["fits"], _FITS, "state['fits']")
    return checked


def _check(given: Mapping[Any, Any], fields: Fields, where: str) -> dict[str, Any]:
    if missing := sorted(fields.keys() - given.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}; it is not what Accumulator.state_dict() returned")
    if unknown := sorted(map(repr, given.keys() - fields.keys())):
        raise ValueError(
            f"{where} has the unknown {', '.join(unknown)}; it is not what Accumulator.state_dict() returned"
        )
    for name, types in fields.items():
        _check_value(given[name], name, types, f"{where}[{name!r}]")
    return dict(given)


def _check_value(value: object, name: str, types: tuple[type, ...], where: str) -> None:
    if type(value) not in types:  # not isinstance: True is no int here, and a tensor no DTensor
        expected = " or ".join("None" if each is _ABSENT else each.__name__ for each in types)
        raise TypeError(f"{where} must be {expected}, got {value!r}")
    if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be a finite number that is not negative, got {value!r}")
    if isinstance(value, Tensor) and (value.dim() != _DIMENSIONS.get(name, 0) or not value.is_floating_point()):
        raise ValueError(f"{where} must hold real numbers in {_DIMENSIONS.get(name, 0)} dimensions, got {value!r}")


def _check_window(window: Mapping[Any, Any], where: str) -> None:
    _check(window, _WINDOW, where)
    if min(window["position"], window["steps"]) < 1 or window["padded"] > window["position"]:
        raise ValueError(f"{where} cannot be at micro-batch {window['position']} of {window['steps']}")
    if 0.0 in (window["count_scale"], window["planned"]):
        raise ValueError(f"{where} cannot have a scale or a plan of 0")


def describe(param: nn.Parameter) -> str:
    """What a parameter must be for a gradient to fit it."""
    kind = f"{str(param.dtype).removeprefix('torch.')} {tuple(param.shape)}"
    return kind if param.requires_grad else f"{kind}, frozen"


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """In words, each entry of two nested dicts that differs, with both values."""
    for key in dict.fromkeys((*theirs, *ours)):
        there, here = theirs.get(key, "missing"), ours.get(key, "missing")
        name = f"{where} {key}".strip()
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from differences(there, here, name)
        elif there != here:
            yield f"{name} is {there!r} in the state and {here!r} here"


def check_gradients(loaded: Mapping[Any, Any], named: Mapping[str, nn.Parameter], model: str) -> None:
    """Raise unless each is a gradient that the parameter of its name can have."""
    for name, grad in loaded.items():
        where = f"state['gradients'][{model!r}][{name!r}]"
        if name not in named:
            raise ValueError(f"{where} belongs to no parameter")
        param = named[name]
        if type(grad) is not Tensor:
            raise TypeError(f"{where} must be a tensor, got {grad!r}")
        dtype = getattr(param, "grad_dtype", param.dtype)  # torch 2.13 has it: None lets a gradient have any dtype
        if grad.shape != param.shape or dtype not in (None, grad.dtype):
            raise ValueError(
                f"{where} is {grad.dtype} {tuple(grad.shape)}, which cannot be the gradient of a parameter that is "
                f"{param.dtype} {tuple(param.shape)} and takes gradients of {dtype or 'any dtype'}"
            )


def copied(value: float | Tensor | None) -> float | Tensor | None:
    """What no later window changes."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def moved(value: Any, device: torch.device) -> Any:
    """A copy of a tensor on ``device``, in float32 where that has no float64."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, precise(device) if value.dtype == torch.float64 else value.dtype, copy=True)
