"""What a new process has to know about DistributedDataParallel to go on bit for bit.

DDP derives its buckets anew from the order in which gradients arrive in its first reduction. With more than two
ranks the place of a number in its bucket decides in which order the ranks' values are added, so a process that begins
with other buckets is off by one bit here and there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch
from typing_extensions import override

from .._gradients import Kept
from .._resuming import Resuming
from ._ddp_reducer import order_of_buckets, reduce_all

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["DDPResuming"]


@final
class DDPResuming(Resuming):
    """DDP's buckets, when it broadcasts buffers, and a static graph's first micro-batch, which torch reduces."""

    def __init__(self, ddp: DistributedDataParallel, arm: Callable[[list[Tensor]], None]) -> None:
        self.kept: list[Kept] = []
        """This rank's own sums before a reduction that only torch needs."""
        self._ddp = ddp
        self._arm = arm

    @property
    def _keeps_buckets(self) -> bool:
        """Whether the buckets are made once, or by rules of its own that need a backward."""
        return bool(self._ddp.find_unused_parameters or self._ddp.static_graph)

    @override
    def order(self) -> list[int]:
        return [] if self._keeps_buckets else order_of_buckets(self._ddp)

    @override
    def can_restore(self, order: Sequence[int]) -> bool:
        ddp = self._ddp
        # A comm hook may count its calls, and a sparse gradient cannot be a zero that nobody has made.
        sparse = any(ddp._build_params_for_reducer()[1])  # type: ignore[no-untyped-call]  # torch's, untyped
        if self._keeps_buckets or sparse or ddp._comm_hooks or ddp.mixed_precision is not None:
            return False
        now = order_of_buckets(ddp)
        return sorted(order) == sorted(now) and list(order) != now

    @override
    def restore(self, order: Sequence[int]) -> None:
        params = list(self._ddp.parameters())
        grads = [p.grad for p in params]
        for param in params:
            param.grad = None
        reduce_all(self._ddp, self._arm, order)  # of zeros
        self._ddp.reducer._rebuild_buckets()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    @override
    def loaded(self) -> None:
        # Buffers have been broadcast in this window: not again before the next reduction.
        vars(self._ddp)["require_forward_param_sync"] = False

    def keep_own(self) -> None:
        """Called in backward: note the sums as they are at its end, before the reducer's own last step."""
        torch.autograd.Variable._execution_engine.queue_callback(self._keep)

    def _keep(self) -> None:
        self.kept = [Kept(param) for param in self._ddp.parameters()]

    def put_back(self) -> None:
        """Undo that reduction."""
        for each in self.kept:
            each.restore()
        self.kept = []
        self.loaded()
