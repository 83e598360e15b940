"""fully_shard (FSDP2), HSDP and the FSDP-based replicate decide in backward, from flags of each parameter
group.

Off the boundary nothing is reduced and parameters stay unsharded after backward, so that the next micro-batch
gathers only what forward has resharded. torch has setters for these flags and no getters, and hides the sums
of a window in its parameter groups, so this file reads private attributes (the same ones from torch 2.6 to
2.13); a missing one is an AttributeError, never a silent no-op.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from .._errors import UnsupportedWrapperError
from .._sync import SyncControl
from ._outputs import ModuleHook, hook_outputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

__all__ = ["FSDP2Control"]

_FLAGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "reduce_scatter_unused_params",  # torch 2.13
)


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]  # FSDPModule's; the caller has checked the class


def _own_groups(state: Any) -> list[Any]:
    """The parameter groups of one module."""
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 allows several, earlier versions one or none
    return [g for g in ([state._fsdp_param_group] if several is None else several) if g is not None]


def _param_groups(module: nn.Module) -> list[Any]:
    """The parameter groups at and below ``module``, in the order of its modules."""
    groups: dict[int, Any] = {}
    for child in module.modules():
        if hasattr(type(child), "_get_fsdp_state"):
            groups.update((id(group), group) for group in _own_groups(_state(child)))
    return list(groups.values())


def _reduces_unused(group: Any) -> bool:
    """Whether this torch can reduce what a unit without a gradient still holds."""
    return getattr(group, "reduce_scatter_unused_params", None) is not None  # end() leaves None where there was none


def _was_used(group: Any) -> bool:
    """Whether forward has gathered the group's parameters at least once."""
    return any(hasattr(param, "_unsharded_param") for param in group.fsdp_params)


def _upcast(param: Any, _: Tensor) -> None:
    """Move the gradient that autograd has just accumulated into the sum in ``reduce_dtype``."""
    if param.unsharded_accumulated_grad is None:
        param.to_accumulated_grad_if_needed()
    else:
        param.accumulate_unsharded_grad_if_needed()


@final
class FSDP2Control(SyncControl):
    """FSDP2: no reduction off the boundary, parameters kept unsharded after such a backward."""

    covers_subtree = True
    must_run_backward = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._param_groups = _param_groups(module)
        trainable = ([p for p in g.fsdp_params if p.sharded_param.requires_grad] for g in self._param_groups)
        self._probes = [params[0] for params in trainable if params]
        self.hidden_sums = self._first_sums
        self.replica_group = getattr(self._mesh_info, "replicate_process_group", None)  # HSDP, replicate
        self._unused = self._param_groups
        self._flags: list[list[list[Any]]] = []
        self._upcasts: list[RemovableHandle] = []
        for group in self._param_groups:
            group.reshard()  # so that the module shows the sharded parameters, the ones that optimizers update
        self.hooks = [module.register_forward_hook(ModuleHook(self._after_forward))]

    @property
    @override
    def groups(self) -> tuple[ProcessGroup, ...]:
        names = ("shard_process_group", "replicate_process_group")
        return tuple(getattr(self._mesh_info, name) for name in names if hasattr(self._mesh_info, name))

    @property
    def _is_hybrid(self) -> bool:
        """Whether shards have copies; the FSDP-based ``replicate`` has copies of whole parameters."""
        return self.replica_group is not None and hasattr(self._mesh_info, "shard_process_group")

    @property
    def _mesh_info(self) -> Any:
        return self._param_groups[0].mesh_info if self._param_groups else None

    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # FSDP2's own hooks break the graph here as well
    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        hook_outputs(output, self.backward_reached)

    def backward_reached(self, grad: Tensor) -> Tensor | None:
        """Backward enters the wrapped module; a dropped micro-batch enters it with zeros."""
        self.disturbed = True
        # torch 2.13: with reduce_grads off, a unit that forward has never used raises AttributeError after backward. It
        # holds nothing to reduce.
        self._unused = [group for group in self._unused if not _was_used(group)]
        for group in self._unused if self._flags else ():
            group.reduce_grads = True  # until end()
        return torch.zeros_like(grad) if self.drop else None

    def _first_sums(self) -> list[Tensor | None]:
        """One sum of each group, where ``model.zero_grad()`` finds it while parameters are unsharded."""
        if self.policy == "memory":  # it is reduced already, and lies where optimizers find it
            grads = [param.sharded_param.grad for param in self._probes]
            return [None if grad is None else grad._local_tensor for grad in grads]
        unsharded = [getattr(param, "_unsharded_param", None) for param in self._probes]
        return [None if param is None else param.grad for param in unsharded]

    @override
    def begin(self, reduce: bool) -> None:
        if _state(self.module)._is_root is False:
            raise UnsupportedWrapperError(
                f"the {type(self.module).__name__} given to Accumulator lies inside another fully_shard module. "
                "Pass the outermost module: the reduction is decided there for all of it."
            )
        if self.policy == "memory" and self._is_hybrid and not _reduces_unused(self._param_groups[0]):
            raise UnsupportedWrapperError(
                'policy="memory" on a 2-D mesh needs torch 2.13: before it, what a unit that is unused at the boundary '
                'holds is lost. Use "balanced" or "speed".'
            )
        if not self._flags:
            self.disturbed = False
        unchanged = reduce and self.policy == "balanced"
        groups = () if unchanged else self._param_groups
        self._flags.append([[getattr(group, name, None) for name in _FLAGS] for group in groups])
        state = _state(self.module)
        if groups and state._is_root is None and state._auto_reshard_after_forward:
            for group in _own_groups(state):  # torch does this in the first forward, which may come before end()
                self._flags[-1][groups.index(group)][_FLAGS.index("post_forward_mesh_info")] = None
        for group in groups:
            self._set_flags(group, reduce)
        if reduce:
            self._upcast_first_gradients()

    def _set_flags(self, group: Any, reduce: bool) -> None:
        if self.policy == "speed":
            group.post_forward_mesh_info = None
        if self.policy == "memory":
            group.all_reduce_grads = group.all_reduce_grads and reduce
            if self._is_hybrid:
                group.reduce_scatter_unused_params = True
        elif not reduce:
            group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False

    def _upcast_first_gradients(self) -> None:
        """Let a parameter whose first gradient of the window comes at the boundary join the sums in ``reduce_dtype``.

        torch 2.13 upcasts off the boundary only, and then asserts that a unit's gradients have one dtype.
        """
        for group in self._param_groups:
            missing = [p for p in group.fsdp_params if p.unsharded_accumulated_grad is None]
            if 0 < len(missing) < len(group.fsdp_params):
                for param in missing:
                    if param._unsharded_param.requires_grad:
                        hook = partial(_upcast, param)
                        self._upcasts.append(param._unsharded_param.register_post_accumulate_grad_hook(hook))

    @override
    def end(self) -> None:
        flags = self._flags.pop()
        for handle in self._upcasts:
            handle.remove()
        self._upcasts = []
        for group, found in zip(self._param_groups, flags, strict=False):
            for name, value in zip(_FLAGS, found, strict=True):
                setattr(group, name, value)
        state = _state(self.module)
        if state._state_ctx.iter_forward_root is not None or state._training_state.name != "IDLE":
            self.disturbed = True  # an exception in the middle of forward

    @override
    def finish(self) -> bool:
        for group in self._param_groups:
            group.reshard()  # parameters left unsharded would miss the optimizer's update, silently
        hidden = any(self._hidden(param) for group in self._param_groups for param in group.fsdp_params)
        return not hidden and all(group._partial_reduce_output is None for group in self._param_groups)

    @staticmethod
    def _hidden(param: Any) -> bool:
        """Whether a sum is waiting where ``.grad`` of the registered parameter does not show it."""
        unsharded = getattr(param, "_unsharded_param", None)
        waiting = unsharded is not None and unsharded.grad is not None
        return waiting or param.unsharded_accumulated_grad is not None

    @override
    def flush(self) -> None:
        # What torch's own pipeline schedules do at the end of a step.
        for group in reversed(self._param_groups):
            found = getattr(group, "reduce_scatter_unused_params", None)
            if group._partial_reduce_output is not None:
                group.reduce_scatter_unused_params = True
            group.post_backward()
            group.reduce_scatter_unused_params = found
        _state(self.module)._root_post_backward_final_callback()
        self.finish()

    @override
    def reset(self) -> None:
        for group in self._param_groups:
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if (unsharded := getattr(param, "_unsharded_param", None)) is not None:
                    unsharded.grad = None
        if hasattr(self.module, "reset_iter_state"):  # torch 2.13
            self.module.reset_iter_state()  # type: ignore[operator]  # FSDPModule's
        for group in self._param_groups:
            group.reshard()
