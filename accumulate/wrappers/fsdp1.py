"""FullyShardedDataParallel (FSDP1) decides in backward, from ``_sync_gradients`` of each instance.

Its public ``no_sync()`` walks the module tree at every call; the instances are cached here instead. Only
outermost instances are controlled: torch accepts ``no_sync()`` on an inner one before the first forward, and
the model is ruined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback, _post_backward_hook
from typing_extensions import override

from .._errors import AccumulateError, UnsupportedWrapperError
from .._sync import SyncControl
from ._outputs import ModuleHook, hook_outputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FSDP1Control"]


@final
class FSDP1Control(SyncControl):
    """FSDP1: no reduction off the boundary; parameters are resharded as its sharding strategy says."""

    covers_subtree = True
    must_run_backward = True

    def __init__(self, module: FullyShardedDataParallel) -> None:
        super().__init__(module)
        self.fsdp = module
        self._instances: list[Any] = FullyShardedDataParallel.fsdp_modules(module)
        self._handles: list[Any] = [m._handle for m in self._instances if m._handle is not None]
        self._flags: list[list[bool]] = []
        self._versions: list[int] = []
        sharded = {handle.uses_sharded_strategy for handle in self._handles}
        if len(sharded) > 1:
            raise UnsupportedWrapperError(
                "FullyShardedDataParallel with NO_SHARD on some units and sharding on others is not supported: "
                "use one sharding_strategy for the whole model."
            )
        self.shard_group = module.process_group if True in sharded else None
        between_nodes = getattr(module, "_inter_node_pg", None)  # HYBRID_SHARD only
        self.replica_group = between_nodes if self.shard_group else module.process_group
        self.hooks = [module.register_forward_hook(ModuleHook(self._after_forward))]

    @property
    @override
    def groups(self) -> tuple[ProcessGroup, ...]:
        between_nodes = getattr(self.fsdp, "_inter_node_pg", None)  # HYBRID_SHARD only
        return tuple(group for group in (self.fsdp.process_group, between_nodes) if group is not None)

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        hook_outputs(output, self.backward_reached)

    def backward_reached(self, grad: Tensor) -> Tensor | None:
        """Backward enters the wrapped module; a dropped micro-batch enters it with zeros."""
        self.disturbed = True
        return torch.zeros_like(grad) if self.drop else None

    @override
    def begin(self, reduce: bool) -> None:
        if self._instances[0]._is_root is False:
            raise UnsupportedWrapperError(
                "the FullyShardedDataParallel given to Accumulator lies inside another one, which owns its schedule. "
                "Pass the outermost module."
            )
        if not self._flags:
            self.disturbed = False
        self._flags.append([m._sync_gradients for m in self._instances])
        if reduce or self.policy == "memory":
            self._versions = [self._version(handle) for handle in self._handles]
        else:
            for module in self._instances:
                module._sync_gradients = False

    @override
    def end(self) -> None:
        for module, flag in zip(self._instances, self._flags.pop(), strict=True):
            module._sync_gradients = flag
        if not self._idle():
            self.disturbed = True

    def _idle(self) -> bool:
        """Whether no forward or backward of it was cut short by an exception."""
        return self.fsdp.training_state == TrainingState.IDLE and all(
            handle._training_state == HandleTrainingState.IDLE for handle in self._handles
        )

    @staticmethod
    def _version(handle: Any) -> int:
        flat = handle.flat_param
        # zero_grad() clears the original parameters; FSDP1 clears the flat gradient behind them in the next forward.
        cleared = handle._use_orig_params and all(p is None or p.grad is None for p in flat._params)
        return -1 if flat.grad is None or cleared else int(flat.grad._version)

    @override
    def finish(self) -> bool:
        handles = zip(self._handles, self._versions, strict=True)
        return all(self._reduced(handle, version) for handle, version in handles)

    def _reduced(self, handle: Any, version_before: int) -> bool:
        """Whether a unit holds no local sum: by the size of its gradient or, if NO_SHARD keeps that, by its version."""
        if self._is_reduced(handle) or handle.uses_sharded_strategy:
            return self._is_reduced(handle)
        return bool(self._instances[0]._sync_gradients and handle.flat_param.grad._version != version_before)

    @staticmethod
    def _is_reduced(handle: Any) -> bool:
        """Whether its gradient is a shard or none; NO_SHARD's never tells."""
        flat = handle.flat_param
        if flat.grad is None:
            return True
        return bool(handle.uses_sharded_strategy and flat.grad.size() == flat._local_shard.size())

    @override
    def flush(self) -> None:
        for module in reversed(self._instances):
            handle = module._handle
            if handle is not None and not self._is_reduced(handle):
                module.training_state = TrainingState.FORWARD_BACKWARD
                handle._training_state = HandleTrainingState.BACKWARD_PRE
                _post_backward_hook(module, handle, handle.flat_param)
        _post_backward_final_callback(self._instances[0], self.fsdp)

    @override
    def reset(self) -> None:
        if not self._idle():
            raise AccumulateError(
                "FullyShardedDataParallel cannot recover from an exception inside its forward or backward (torch has "
                "no reset for it). Build the model again and load the last checkpoint, or move to fully_shard."
            )
        for handle in self._handles:
            handle.flat_param.grad = None
