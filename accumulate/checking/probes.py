"""Ways of looking into a run: the factors and the terms of its loss, and what each layer makes of each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..wrappers._outputs import tensors_in

__all__ = ["Factors", "Layer", "RowsOfLayers", "Terms", "first_that_mixes_rows"]

_DIVISIONS = frozenset(["div", "div_", "divide", "divide_", "true_divide", "true_divide_"])
_PRODUCTS = frozenset(["mul", "mul_", "multiply", "multiply_"])


class Factors(TorchFunctionMode):
    """Notes by which numbers scalars are multiplied or divided, and leaves out those that it is told to."""

    def __init__(self, leave_out: float | None = None, *, leave_out_statistics: bool = False) -> None:
        super().__init__()
        self.seen: set[float] = set()
        self._leave_out = leave_out
        self._statistics = leave_out_statistics

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DIVISIONS or name in _PRODUCTS:
            operands = (*args, *(kwargs[key] for key in ("other",) if key in kwargs))
            if (kept := self._without(name, operands)) is not None:
                return kept
        return func(*args, **kwargs)

    def _without(self, name: str, operands: tuple[Any, ...]) -> Tensor | None:
        """The operand to go on with, if the other one is to be left out."""
        if len(operands) != 2 or not isinstance(operands[0], Tensor):
            return None
        kept, by = operands
        if name in _PRODUCTS and isinstance(by, Tensor) and not kept.requires_grad:
            kept, by = by, kept
        if self._statistics:
            return kept if name in _DIVISIONS and isinstance(by, Tensor) and by.numel() == 1 else None
        if kept.numel() != 1 or not _is_number(by):
            return None
        value = float(by)
        factor = value if name in _PRODUCTS else 1.0 / value if value else math.inf
        self.seen.add(factor)
        return kept if self._leave_out is not None and math.isclose(factor, self._leave_out, rel_tol=1e-6) else None


def _is_number(by: object) -> bool:
    if isinstance(by, Tensor):
        return by.numel() == 1 and not by.requires_grad and not by.is_complex()
    return isinstance(by, (int, float))


class Terms(TorchFunctionMode):
    """Counts the additions of two scalars that lead to parameters, and leaves out the first operand of one of them."""

    def __init__(self, leave_out: int = -1) -> None:
        super().__init__()
        self.count = 0
        self._leave_out = leave_out

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("add", "add_") and len(args) == 2 and all(map(_is_term, args)):
            self.count += 1
            if self.count - 1 == self._leave_out:
                return args[1]
        return func(*args, **dict(kwargs or {}))


def _is_term(operand: object) -> bool:
    return isinstance(operand, Tensor) and operand.numel() == 1 and operand.requires_grad


class Layer(NamedTuple):
    """One output of one call of a layer, as a few numbers for each row."""

    name: str
    module: nn.Module
    multiple: int
    """How many times the batch's rows the first dimension is."""
    rows: Tensor


class RowsOfLayers:
    """Hooks that note what each layer of a copy makes of each row, in the order in which layers finish."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.seen: list[Layer] = []
        self._rows = rows
        for name, module in model.named_modules():
            module.register_forward_hook(self._note(name or "the model"))

    def _note(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, args: object, output: object) -> None:
            for tensor in tensors_in(output):
                if tensor.dim() and len(tensor) and len(tensor) % self._rows == 0 and tensor.is_floating_point():
                    each = tensor.detach().reshape(self._rows, -1).cpu().double()
                    numbers = torch.stack([each.sum(1), each.norm(dim=1)], dim=1)
                    self.seen.append(Layer(name, module, len(tensor) // self._rows, numbers))

        return note


def first_that_mixes_rows(whole: Sequence[Layer], parts: Sequence[Sequence[Layer]], limit: float) -> Layer | None:
    """The first layer whose output for a row depends on the company it is in; None if none is seen to."""
    for index in range(min(map(len, [whole, *parts]))):
        layer, others = whole[index], [part[index] for part in parts]
        if any((other.name, other.multiple) != (layer.name, layer.multiple) for other in others):
            continue  # rows are not its first dimension
        together = torch.cat([other.rows for other in others])
        if float((together - layer.rows).norm()) > limit * float(layer.rows.norm()):
            return layer
    return None
