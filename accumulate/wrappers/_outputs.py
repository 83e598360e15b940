"""Noticing the moment at which backward reaches a wrapped module: a tensor hook on each of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Grads", "ModuleHook", "hook_outputs", "tensors_in", "zeros_like"]

Grads: TypeAlias = "Tensor | tuple[Tensor | None, ...]"
"""What a tensor's hook gets, or a graph node's pre-hook."""


class ModuleHook(partial[object]):
    """A hook of a module that its copies and pickles leave behind: ``copy.deepcopy(ddp.module)`` makes EMA models."""

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _get_nothing, ()


def _nothing(*args: object) -> None:
    """The hook that a copy has instead."""


def _get_nothing() -> Callable[..., None]:
    return _nothing


def zeros_like(grads: Grads) -> Grads:
    """Zeros in the place of each gradient, so that nothing of a dropped micro-batch enters the module."""
    if isinstance(grads, Tensor):
        return torch.zeros_like(grads)
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def tensors_in(output: object) -> list[Tensor]:
    """Every tensor of a module's output: nested tuples, lists, mappings and dataclasses, as DDP looks for them."""
    if isinstance(output, Tensor):
        return [output]
    items: Iterable[object] = ()
    if isinstance(output, (list, tuple)):
        items = output
    elif isinstance(output, Mapping):
        items = output.values()
    elif is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name) for field in fields(output)]
    return [tensor for item in items for tensor in tensors_in(item)]


def hook_outputs(output: object, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Let ``hook`` see the gradient of each output tensor, when and if backward reaches it."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no annotations here
