"""Who else may touch a model while a window is open: optimizers, other accumulators, wrappers put around it later."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._errors import AccumulateError, WindowError
from ._sync import Found, matches
from ._tally import Tally

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Surroundings"]


class HasWindow(Protocol):
    """One accumulator's windows."""

    open: Tally | None


class Surroundings:
    """What is looked at whenever a window opens."""

    def __init__(self, owner: HasWindow, models: Mapping[str, nn.Module], found: Sequence[Found]) -> None:
        self._models = _Models(models, found)
        self._rivals = _Rivals(owner, [p for model in models.values() for p in model.parameters()])

    def check(self) -> None:
        """Raise if the model has changed, or if another accumulator has a window open on it."""
        self._rivals.refuse()
        self._models.check()

    @property
    def is_updated(self) -> bool:
        """Whether an optimizer has stepped parameters of the models since the last window was closed."""
        return self._rivals.is_updated

    @is_updated.setter
    def is_updated(self, is_updated: bool) -> None:
        self._rivals.is_updated = is_updated

    def close(self) -> None:
        """Look no more."""
        for hook in (self._rivals.handle, *self._models.hooks):
            hook.remove()


class _Rivals:
    """The other accumulators that hold a parameter of this one, and the optimizers that step them."""

    def __init__(self, owner: HasWindow, params: Sequence[nn.Parameter]) -> None:
        self._ids = frozenset(map(id, params))
        self._owner = weakref.ref(owner)
        self.is_updated = False
        self._others: weakref.WeakSet[_Rivals] = weakref.WeakSet()
        for other in list(_alive):
            if not self._ids.isdisjoint(other._ids):
                self._others.add(other)
                other._others.add(self)
        _alive.add(self)
        self.handle: RemovableHandle = register_optimizer_step_pre_hook(_StepHook(self))

    def window(self) -> Tally | None:
        """The window that is open."""
        owner = self._owner()
        return None if owner is None else owner.open

    def refuse(self) -> None:
        """Raise if another accumulator has a window open on the same parameters."""
        for other in self._others:
            if (window := other.window()) is not None:
                raise WindowError(
                    "another Accumulator has a window open on parameters of this model, after micro-batch "
                    f"{window.position} of {window.steps}; both would add to the same gradients. Close it with its "
                    "flush(), or drop it with its reset() or close()."
                )

    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer steps a parameter of this model in mid-window; note it elsewhere."""
        window = self.window()
        held = (p for group in optimizer.param_groups for p in group["params"])
        if not any(id(p) in self._ids for p in held):
            return
        if window is None or (window.steps == 1 and not window.position):  # an optimizer inside backward may do that
            self.is_updated = True
        else:
            raise WindowError(
                f"{type(optimizer).__name__}.step() after micro-batch {window.position} of {window.steps}, where "
                "gradients are partial. Step after the block when is_boundary is true, or call optimizer_step(), which "
                "waits for that; flush() closes the window now."
            )


_alive: weakref.WeakSet[_Rivals] = weakref.WeakSet()


class _StepHook:
    """Called before each step of any optimizer; it keeps nothing alive."""

    def __init__(self, rivals: _Rivals) -> None:
        self._rivals = weakref.ref(rivals)

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not torch.compiler.is_compiling() and (rivals := self._rivals()) is not None:
            rivals.refuse_step(optimizer)


class _Models:
    """The user's modules as they were at construction; a wrapper that comes later would not be steered."""

    def __init__(self, models: Mapping[str, nn.Module], found: Sequence[Found]) -> None:
        self._models = models
        self._found = found
        # FSDP shows other parameters while they are gathered, so they are compared where there is none.
        sharded = {id(module) for _, control in found if control.covers_subtree for module in control.module.modules()}
        free = {name: model for name, model in models.items() if sharded.isdisjoint(map(id, model.modules()))}
        self._params = {name: list(model.parameters()) for name, model in free.items()}
        self._is_new = True
        self.hooks: list[RemovableHandle] = []

    def check(self) -> None:
        """Raise if they have changed: at first every module and parameter is looked at, later the first parameters."""
        for name, then in self._params.items():
            model = self._models[name]
            now = (
                list(model.parameters()) if self._is_new else [p for p, _ in zip(model.parameters(), [0], strict=False)]
            )
            if any(a is not b for a, b in zip_longest(now, then if self._is_new else then[:1])):
                raise AccumulateError(
                    f"the parameters of {name} are not those that it had when the Accumulator was constructed "
                    "(replaced, wrapped or sharded since?). Construct it last, with the model as it is trained."
                )
        if self._is_new:
            self._check_wrappers()
        self._is_new = False

    def _check_wrappers(self) -> None:
        then = [(name, control.module) for name, control in self._found]
        now = [(name, module) for name, module, _ in matches(self._models)]
        if [(name, id(module)) for name, module in now] != [(name, id(module)) for name, module in then]:
            raise AccumulateError(
                f"the wrappers were {_named(then)} when the Accumulator was constructed, and are {_named(now)}. "
                "Construct the Accumulator last, with the wrapped model."
            )
        if not now and dist.is_available() and dist.is_initialized():
            self.hooks = [model.register_forward_pre_hook(self._refuse_ddp_around) for model in self._models.values()]

    def _refuse_ddp_around(self, module: nn.Module, args: object) -> None:
        """Raise in the first forward if a DistributedDataParallel runs it; other wrappers leave traces in the model."""
        for hook in self.hooks:
            hook.remove()
        distributed: Any = sys.modules["torch.nn.parallel.distributed"]  # torch imports it
        if distributed.DistributedDataParallel._active_ddp_module is not None:
            raise AccumulateError(
                f"the {type(module).__name__} given to Accumulator runs inside a DistributedDataParallel, which would "
                "reduce every micro-batch. Give the wrapped model to Accumulator."
            )


def _named(wrappers: Sequence[tuple[str, nn.Module]]) -> str:
    return ", ".join(f"{type(module).__name__} at {name}" for name, module in wrappers) or "none"
