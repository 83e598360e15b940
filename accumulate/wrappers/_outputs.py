"""Noticing the moment at which backward reaches a wrapped module: a tensor hook on each of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

__all__ = ["hook_outputs", "tensors_in"]


def tensors_in(output: object) -> Iterator[Tensor]:
    """Every tensor of a module's output: nested tuples, lists, mappings and dataclasses, as DDP looks for them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))


def hook_outputs(output: object, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Let ``hook`` see the gradient of each output tensor, when and if backward reaches it."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)
