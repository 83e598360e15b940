"""What is checked: copies of the user's model, run on a whole batch or on micro-batches, each time from one state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._accumulator import Accumulator
from .._arguments import check_loss, check_weight
from .randomness import Constants, RandomState

__all__ = ["Batch", "Grads", "LossFunction", "Run", "Subject", "copied"]

Batch: TypeAlias = "tuple[Tensor, ...]"
Grads: TypeAlias = "dict[str, Tensor]"
"""Gradients by parameter name, in float64 on the host."""
LossFunction: TypeAlias = "Callable[..., Tensor | tuple[Tensor, float | Tensor]]"


class Run(NamedTuple):
    """What one forward and backward gave."""

    loss: float
    weight: float | None
    grads: Grads


@dataclass(frozen=True)
class Subject:
    """A model with its loss and its batch. Every run starts from a new copy of the model and from a seed."""

    model: nn.Module
    loss_fn: LossFunction
    batch: Batch
    steps: int
    random: RandomState
    dtype: torch.dtype
    """The lowest precision in which gradients are computed."""
    constants: bool = False
    """Whether random numbers are replaced by constants."""
    frozen: bool = False
    """Whether BatchNorm uses its running statistics."""

    @property
    def rows(self) -> int:
        """How many samples the batch holds."""
        return len(self.batch[0])

    def parts(self) -> list[Batch]:
        """The batch in micro-batches, whose sizes differ by one row at most."""
        columns = [tensor.tensor_split(self.steps) for tensor in self.batch]
        return list(zip(*columns, strict=True))

    def fresh(self) -> nn.Module:
        """A copy of the model, without gradients."""
        model = copy.deepcopy(self.model)
        model.zero_grad(set_to_none=True)
        if self.frozen:
            for layer in model.modules():
                if isinstance(layer, _BatchNorm) and normalises_by_batch(layer):
                    _freeze(layer)
        return model

    def run(
        self,
        batch: Batch | None = None,
        *,
        seed: int = 0,
        on: nn.Module | None = None,
        mode: AbstractContextManager[object] | None = None,
    ) -> Run:
        """One plain forward and backward, by default of the whole batch on a fresh copy."""
        model = self.fresh() if on is None else on
        model.zero_grad(set_to_none=True)
        with self._settled(seed), mode or nullcontext():
            loss, weight = self._loss(model, self.batch if batch is None else batch)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotations here
        return Run(float(loss.detach()), None if weight is None else float(weight), _grads(model))

    def each(self) -> list[Run]:
        """Each micro-batch by itself, on a copy of its own."""
        return [self.run(part) for part in self.parts()]

    def window(self) -> tuple[Grads, list[float]]:
        """The gradient of the micro-batches through a real accumulator; also the loss of each one that counts."""
        model = self.fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it would say about this model is what is being checked
            acc = Accumulator(model, self.steps)
        losses = []
        with self._settled(0):
            for seed, part in enumerate(self.parts()):
                self.random.seed(seed)  # else one dropout layer has the big batch's mask by chance
                with acc.step():
                    loss, weight = self._loss(model, part)
                    acc.backward(loss, weight)
                losses += [float(loss.detach())] if weight is None or float(weight) else []
        return _grads(model), losses

    def forward(self, batch: Batch, mode: AbstractContextManager[object]) -> None:
        """Only the loss, under ``mode``."""
        with self._settled(0), mode:
            self._loss(self.fresh(), batch)

    def _loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor | None]:
        given = self.loss_fn(model, *map(copied, batch))
        if isinstance(given, tuple) and len(given) != 2:
            raise TypeError(f"loss_fn must return a loss or (loss, weight), got a tuple of {len(given)}")
        loss, weight = given if isinstance(given, tuple) else (given, None)
        check_loss(loss)
        return loss, check_weight(weight, "mean")

    @contextmanager
    def _settled(self, seed: int) -> Iterator[None]:
        self.random.seed(seed)
        with ExitStack() as stack:
            if self.constants:
                stack.enter_context(Constants())
            yield


def copied(tensor: Tensor) -> Tensor:
    """A tensor of the same values, which ``loss_fn`` may change, and which requires grad if the original does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def normalises_by_batch(layer: _BatchNorm) -> bool:
    """Whether a BatchNorm layer uses the statistics of the batch at hand."""
    return layer.training or layer.running_mean is None


def _freeze(layer: _BatchNorm) -> None:
    layer.eval()
    if layer.running_mean is None:  # track_running_stats=False uses the batch's in eval mode as well
        some = next(layer.parameters(), torch.zeros(()))
        layer.running_mean = torch.zeros(layer.num_features, device=some.device, dtype=some.dtype)
        layer.running_var = torch.ones_like(layer.running_mean)


def _grads(model: nn.Module) -> Grads:
    found = {}
    for name, parameter in model.named_parameters():
        if (grad := parameter.grad) is not None:
            grad = grad.to_dense() if grad.is_sparse else grad
            grad = torch.view_as_real(grad) if grad.is_complex() else grad
            found[name.replace("_orig_mod.", "")] = grad.detach().cpu().double()
    return found
