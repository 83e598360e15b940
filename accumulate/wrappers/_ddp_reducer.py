"""DistributedDataParallel's reducer, driven without a backward of its module, and the options that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .._errors import AccumulateError, UnsupportedWrapperError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn.parallel import DistributedDataParallel

    from ._outputs import Grads

__all__ = ["Arm", "Switch", "check_reduced", "order_of_buckets", "reduce_all", "refuse_options", "refused"]


class Switch:
    """DDP's flag, off for the duration of a forward; it hangs among the hooks, so that the last user's leaving finds it
    on, too.

    torch 2.13 calls no forward hook after Ctrl-C, nor after any exception in a compiled module.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes
        self.is_off = False

    def off(self) -> None:
        self.is_off = True
        self._attributes["require_backward_grad_sync"] = False

    def remove(self) -> None:
        """Back to on, if it is off."""
        if self.is_off:
            self.is_off = False
            self._attributes["require_backward_grad_sync"] = True


class Arm:
    """The hook of one forward that holds what ``find_unused_parameters`` searches when backward reaches it."""

    __slots__ = ("_reached", "blocks_left", "outputs")

    def __init__(self, reached: Callable[[list[Tensor] | None, Grads], Grads | None], outputs: list[Tensor]) -> None:
        self._reached = reached
        self.outputs: list[Tensor] | None = outputs
        self.blocks_left = 2

    def __call__(self, grads: Grads) -> Grads | None:
        self.blocks_left = 0
        return self._reached(self.outputs, grads)


class _Reduce(Function):
    """A backward that hands gradients to a DDP module's reducer by parameter index, as autograd's hooks would."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, module: DistributedDataParallel, indices: list[int]) -> Tensor:
        ctx.module, ctx.indices = module, indices
        return seed.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        reducer = ctx.module.reducer
        if ctx.module.static_graph:
            reducer._delay_all_reduce()
        else:
            for index in ctx.indices:
                reducer._autograd_hook(index)
        return grads[0], None, None


def reduce_all(
    ddp: DistributedDataParallel, arm: Callable[[list[Tensor]], None], order: Sequence[int] | None = None
) -> None:
    """Reduce what is in ``.grad`` through DDP's own buckets and comm hooks, once ``arm`` has armed the reducer.

    ``order`` is the one in which the reducer is told of its parameters, by default the last first.
    """
    params = _reduced_parameters(ddp)
    indices = [*reversed(range(len(params)))] if order is None else list(order)
    outputs: list[Tensor] = []
    with torch.enable_grad():
        if ddp.find_unused_parameters and not ddp.static_graph:
            # What these aliases do not reach counts as unused: the reducer marks it ready itself, and only once.
            outputs = [p.view_as(p) for p in params]
            indices = [i for i in indices if params[i].requires_grad]
        arm(outputs)
        seed = torch.zeros((), device=params[0].device, requires_grad=True)
        _Reduce.apply(seed, ddp, indices).backward()  # type: ignore[no-untyped-call]  # torch's, untyped


def _reduced_parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The reducer's parameters in its own order."""
    params: list[nn.Parameter] = ddp._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]  # torch's, untyped
    if len(params) == int(_logged(ddp, "num_parameter_tensors")):
        return params
    # Some were frozen since DDP was constructed; this costs a gradient-sized allocation for a moment.
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    known = {id(p) for bucket in buckets for p in bucket.parameters()}
    return [p for p in ddp.module.parameters() if id(p) in known]


def order_of_buckets(ddp: DistributedDataParallel) -> list[int]:
    """The reducer's parameters in the order of its buckets; allocates a gradient's size for a moment."""
    index = {id(p): i for i, p in enumerate(_reduced_parameters(ddp))}
    return [index[id(p)] for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()]


def _logged(ddp: DistributedDataParallel, key: str) -> str:
    data: dict[str, object] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch's, untyped
    return str(data.get(key, ""))


def check_reduced(ddp: DistributedDataParallel) -> None:
    """Raise if the backward that was armed has left a bucket unreduced, which torch says one update too late."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        raise AccumulateError(
            "a DistributedDataParallel parameter got no gradient in the boundary micro-batch, or one from outside "
            "the module's forward: its bucket is not reduced and the ranks' gradients differ. Use every parameter "
            "inside forward in each boundary micro-batch, or find_unused_parameters=True; then reset() and repeat "
            "the window."
        ) from error


def refuse_options(ddp: DistributedDataParallel) -> None:
    """Raise :class:`UnsupportedWrapperError` for an option under which accumulated gradients are wrong."""
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise refused("delay_all_reduce_named_params", "those parameters are reduced whatever no_sync says")
    if getattr(ddp, "skip_all_reduce_unused_params", False) and "," in _logged(ddp, "bucket_sizes"):
        raise refused("skip_all_reduce_unused_params", "with several buckets ranks would skip different ones")
    if getattr(ddp, "_use_python_reducer", False):
        raise refused("the python reducer of compiled autograd", "it leaves no reducer to steer")


def refused(option: str, reason: str) -> UnsupportedWrapperError:
    """The error for an option of DDP."""
    return UnsupportedWrapperError(
        f"DistributedDataParallel with {option} gives wrong gradients under accumulation: {reason}. Use it without."
    )
