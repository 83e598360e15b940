"""DistributedDataParallel decides in forward whether to reduce; this adapter moves the decision into backward.

Required of any mechanism here: forward may run outside the block; the user's flag and his own ``no_sync`` must survive;
reductions must overlap with backward as DDP's own do; comm hooks, buckets and averages must be DDP's own.

A forward pre-hook switches ``require_backward_grad_sync`` off for the duration of DDP's forward, a forward hook puts it
back and hangs a hook on the graph node of each output (off the boundary only when the block ends, since no backward
inside may reduce). When backward reaches one, it arms DDP's reducer as its forward would have, unless a micro-batch off
the boundary is open.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from .._errors import AccumulateError
from .._sync import SyncControl
from ._ddp_reducer import Arm, Switch, check_reduced, reduce_all, refuse_options, refused
from ._ddp_resume import DDPResuming
from ._outputs import Grads, ModuleHook, tensors_in, zeros_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.autograd.graph import Node
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

__all__ = ["DDPControl"]


@final
class DDPControl(SyncControl):
    """DDP: off the boundary nothing is sent, at the boundary DDP's reducer runs as ever."""

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module)
        self.ddp = module
        self.replica_group, ignored = module.process_group, module.parameters_to_ignore
        refuse_options(module)
        # A static graph's reducer is flushed by other collectives than its backward runs, so no rank may leave one out.
        # Nor where backward has collectives of its own.
        synced = any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
        self.must_run_backward = module.static_graph or synced
        self.local_names, self._blocks = {f"module.{name}" for name in ignored}, list[bool]()
        self._armed, self._task = 0, -1
        self._flag, self._version = True, -1
        self._inner_outputs: list[Tensor] = []
        self._noted: tuple[int, list[int]] | None = None
        self.before_another_backward = self._note
        self.resuming = self._own = DDPResuming(module, self._arm)
        self._cycles: list[Arm] = []
        self._late: list[Node] = []
        self._probe = next((p for p in module.parameters() if p.requires_grad), None)
        self._leaves: list[RemovableHandle] = []
        self._reached = partial(self.backward_reached, [])
        self._attributes = vars(module)  # nn.Module.__setattr__ takes 3 us
        self._switch = Switch(self._attributes)
        self.hooks = [
            self._switch,
            module.register_forward_pre_hook(ModuleHook(self._before_forward)),
            module.register_forward_hook(ModuleHook(self._after_forward), always_call=True),
        ]
        if module.find_unused_parameters and not module.static_graph:
            self.hooks.append(module.module.register_forward_hook(ModuleHook(self._after_inner_forward)))

    @property
    @override
    def groups(self) -> tuple[ProcessGroup, ...]:
        return (self.ddp.process_group,)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, ddp: DistributedDataParallel, args: object) -> None:
        """Keep DDP from deciding in forward, except for the very first forward of a static graph."""
        self._switch.remove()
        self._flag = ddp.require_backward_grad_sync
        # torch 2.13: a static graph's first backward must be armed by its forward, or the reducer asserts.
        first_static = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued
        if self._flag and not first_static:
            self._switch.off()

    def _after_inner_forward(self, module: object, args: object, output: object) -> None:
        # What find_unused_parameters searches must be alive when backward comes. DDP puts an identity function behind
        # these tensors, so a hook on its outputs can hold them without holding itself.
        self._inner_outputs = [t for t in tensors_in(output) if t.requires_grad]

    def _after_forward(self, ddp: DistributedDataParallel, args: object, output: object) -> None:
        inner = self._inner_outputs
        self._inner_outputs = []
        deferred = self._switch.is_off
        self._switch.remove()
        if not self._flag or not torch.is_grad_enabled():
            return
        if isinstance(output, Tensor) and output.requires_grad and deferred and not inner:
            self._hang(self._reached, output)
        else:
            self._hang_on_all(output, inner, deferred)

    def _hang_on_all(self, output: object, inner: list[Tensor], deferred: bool) -> None:
        hook: Callable[[Grads], Grads | None] = self._reached
        if not deferred:
            hook = self.count_armed
        elif inner:
            hook = Arm(self.backward_reached, inner)
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not tensors and False not in self._blocks and sys.exc_info()[0] is None:
            self._arm([])  # the loss is where only the user can look: decide now, as DDP does
        for tensor in tensors:
            self._hang(hook, tensor)
            if isinstance(hook, Arm) and any(tensor is held for held in inner):
                # DDP's identity does not look into dataclasses: this hook holds the tensor it hangs on. The garbage
                # collector cannot see such a cycle, so ``end`` breaks it.
                self._cycles.append(hook)

    def _hang(self, hook: Callable[[Grads], Grads | None], tensor: Tensor) -> None:
        """Let ``hook`` know when backward reaches this output, by the cheapest means."""
        if torch.compiler.is_compiling():  # dynamo knows hooks on tensors only
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's, untyped
        elif tensor.grad_fn is None:  # a parameter as output, which would gather a hook with each forward
            self._leaves.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]  # torch's, untyped
        elif False in self._blocks and hook is self._reached and not (self.must_run_backward or self.drop):
            self._late.append(tensor.grad_fn)  # a backward in this block must not reduce, so it needs no hook yet
        else:
            tensor.grad_fn.register_prehook(hook)

    # -- backward -----------------------------------------------------------------------------------------------------

    def count_armed(self, grads: Grads) -> Grads | None:
        """Backward reached a forward that DDP armed itself."""
        self.disturbed = True
        self._armed += 1
        if False in self._blocks:
            self._own.keep_own()
        return zeros_like(grads) if self.drop else None

    def backward_reached(self, outputs: list[Tensor] | None, grads: Grads) -> Grads | None:
        """Arm the reducer, once per backward, unless a micro-batch off the boundary is open."""
        self.disturbed = True
        task = torch._C._current_graph_task_id()
        if task != self._task and False not in self._blocks:
            self._task = task
            if outputs is None:
                raise AccumulateError(
                    "with find_unused_parameters=True and a dataclass as output, backward must come at most one step() "
                    "block after its forward. Return a tuple or a dict, or run backward earlier."
                )
            self._arm(outputs)
        return zeros_like(grads) if self.drop else None

    def _arm(self, outputs: list[Tensor]) -> None:
        self.ddp.reducer._rebuild_buckets()  # else a second backward in the first reduced window asserts
        self.ddp.reducer.prepare_for_backward(outputs)
        self._attributes["require_forward_param_sync"] = True  # the next forward broadcasts buffers, as after DDP's own
        self._armed += 1

    # -- SyncControl --------------------------------------------------------------------------------------------------

    @override
    def begin(self, reduce: bool) -> None:
        if self.ddp._join_config.enable:
            raise refused("an enclosing join()", "a rank that joined early loses its open window")
        if not self._blocks:
            self.disturbed = False
            self._armed = 0
            self._noted = None
            self.backwards = 0
        self._blocks.append(reduce)
        self._version = self._probe_version()

    @override
    def end(self) -> None:
        self._blocks.pop()
        self._switch.remove()
        if self._late:
            self._hang_late()
        if self._leaves or self._cycles:
            self._break_cycles()
        if self._own.kept:
            self._own.put_back()

    def _probe_version(self) -> int:
        return -1 if self._probe is None or (grad := self._probe.grad) is None else grad._version

    def _hang_late(self) -> None:
        """Hooks on the outputs of this block's forwards whose backward may still come, to decide then."""
        # The usual block has run its only forward's only backward, and a hook would cost more than all the rest here.
        # Had a backward come from an earlier forward, that one's hook would have noted it.
        is_done = (
            len(self._late) == self.backwards == 1 and not self.disturbed and self._probe_version() != self._version
        )
        for node in () if is_done else self._late:
            node.register_prehook(self._reached)
        self._late.clear()

    def _break_cycles(self) -> None:
        for handle in self._leaves:
            handle.remove()
        self._leaves = []
        for arm in self._cycles:
            if arm.blocks_left == 0:
                arm.outputs = None
            arm.blocks_left = max(0, arm.blocks_left - 1)
        self._cycles = [arm for arm in self._cycles if arm.outputs is not None]

    @override
    def finish(self) -> bool:
        if not self._armed:
            return all(p.grad is None for p in self.ddp.parameters())
        self._attributes["require_forward_param_sync"] = True  # a checkpoint's second forward has cleared it
        check_reduced(self.ddp)
        if self._noted is not None and self._noted[0] == self._armed and self._noted[1] != self._versions():
            raise AccumulateError(
                "the last loss of the boundary micro-batch reached parameters of DistributedDataParallel not through "
                "its outputs, after the others were reduced, so ranks' gradients differ. Run its backward first or add "
                "it to the other loss; then reset() and repeat the window."
            )
        # DDP would do this (once, with a broadcast) in its next forward, which a rank without more data never reaches.
        self.ddp.reducer._rebuild_buckets()
        return True

    def _note(self) -> None:
        """Remember what is reduced so far, to see whether a further backward adds to it without being reduced."""
        self._noted = (self._armed, self._versions()) if self._armed else None

    def _versions(self) -> list[int]:
        return [-1 if (grad := p.grad) is None else grad._version for p in self.ddp.parameters()]

    @override
    def flush(self) -> None:
        self._armed = 0
        reduce_all(self.ddp, self._arm)
        self.finish()

    @override
    def reset(self) -> None:
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError:  # a reduction that failed half-way; without this every later forward raises
            self.ddp.reducer._reset_state()
        if self.ddp.find_unused_parameters and not self.ddp.static_graph:
            # torch 2.13: it has noted what the dropped backwards used, and would reduce gradients that are gone.
            self.ddp.reducer._reset_state()
