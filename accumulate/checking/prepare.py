"""Before the first run: which arguments are refused, copies in several precisions, a user's model left unharmed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from .._arguments import check_steps
from .._errors import UnsupportedWrapperError
from .._sync import find, release
from .randomness import RandomState
from .subject import LossFunction, Subject, copied

__all__ = ["better_precisions", "check_arguments", "in_precision", "is_low", "native_subject", "plainly", "unharmed"]


def check_arguments(model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor], steps: int) -> None:
    """Raise for what cannot be checked, before anything is run."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the model and the batch's tensors, got {loss_fn!r}")
    _check_batch(batch)
    if check_steps(steps) < 2:
        raise ValueError(f"steps must be at least 2 to compare with one big batch, got {steps!r}")
    rows = {len(tensor) for tensor in batch}
    if len(rows) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch)
        raise ValueError(f"the tensors of batch must have equal first dimensions (the samples), got shapes {shapes}")
    if len(batch[0]) < steps:
        raise ValueError(
            f"batch holds {len(batch[0])} samples, too few for {steps} micro-batches; pass more, or fewer steps"
        )
    _refuse_wrapped(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no parameter with requires_grad=True, so there is no gradient to compare")


def _check_batch(batch: Sequence[Tensor]) -> None:
    given: object = batch  # what it is, not what its annotation promises
    advice = "other arguments belong into loss_fn, and a dict's values can be passed as a tuple"
    if not isinstance(given, (tuple, list)) or not all(isinstance(each, Tensor) for each in given):
        kind = type(given).__name__
        what = f"{kind} of {', '.join(type(e).__name__ for e in given)}" if isinstance(given, (tuple, list)) else kind
        raise TypeError(f"batch must be a tuple of tensors, got a {what}; {advice}")
    if not given or any(each.dim() == 0 for each in given):
        raise ValueError(f"batch must hold at least one tensor, and none without dimensions; {advice}")


def _refuse_wrapped(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):  # its copies' parameters are no leaves
        raise TypeError(f"model is a {type(model).__name__}; pass the module as it is before torch.jit.script")
    found = find({"model": model})
    release(found)
    for name, control in found:
        raise UnsupportedWrapperError(
            f"{name} is a {type(control.module).__name__}, and check() runs copies in one process. Pass the module as "
            "it is before it is wrapped (for DistributedDataParallel: its .module)."
        )


def native_subject(
    model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor], steps: int, random: RandomState
) -> Subject:
    """A copy of everything in the user's own precision."""
    try:
        model = copy.deepcopy(model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"model cannot be copied by copy.deepcopy, and check() only runs copies: {error}") from error
    given = (p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point())
    lowest = min(given, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
    return Subject(model, loss_fn, tuple(map(copied, batch)), int(steps), random, lowest)


def is_low(dtype: torch.dtype) -> bool:
    """Whether sums in this dtype lose small terms."""
    return torch.finfo(dtype).bits < 32


def better_precisions(native: Subject) -> list[torch.dtype]:
    """What to try before the user's own, the best first."""
    bits = torch.finfo(native.dtype).bits
    return [dtype for dtype in (torch.float64, torch.float32) if torch.finfo(dtype).bits > bits]


def in_precision(native: Subject, dtype: torch.dtype) -> Subject:
    """A copy in that precision."""
    model = copy.deepcopy(native.model)
    model = model.double() if dtype == torch.float64 else model.float()
    batch = tuple(copied(tensor).to(dtype) if tensor.is_floating_point() else tensor for tensor in native.batch)
    return replace(native, model=model, batch=batch, dtype=dtype)


@contextmanager
def plainly() -> Iterator[None]:
    """With gradients, and without compiling: each copy would be compiled anew."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:  # else nothing here is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def unharmed(model: nn.Module) -> Iterator[None]:
    """Whatever ``loss_fn`` does inside, the user's model has its gradients, buffers and modes afterwards."""
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)
        for module, training in modes:
            module.training = training
