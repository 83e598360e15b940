"""How the library finds the wrappers in a model and talks to them.

An adapter is one final class per wrapper that implements :class:`SyncControl`. Wrapper classes are looked up in
``sys.modules``: a wrapper whose module was never imported cannot be in the model, so importing this library imports
none. A class that looks like a wrapper and has no adapter is refused; ``hasattr`` never chooses behaviour.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ._errors import UnsupportedWrapperError
from ._foreign import refuse_unknown
from ._resuming import Resuming

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._typing import Removable

__all__ = ["Found", "SyncControl", "acquire", "begin", "find", "matches", "register", "release"]


class SyncControl(ABC):
    """Steers the gradient reduction of one wrapped module; subclass it to teach the library a wrapper.

    The library calls, for each micro-batch, ``begin(reduce)`` and ``end()``; after a micro-batch that reduced
    also ``finish()``. ``reset()`` comes between micro-batches only, and so does ``flush()``, except that it stands in
    for the backward of a dropped micro-batch at the boundary. See :func:`register`.
    """

    covers_subtree = False
    """True if one instance steers the same wrapper further down, so that only the outermost one is controlled."""
    must_run_backward = False
    """True while every backward has collectives, so that a rank cannot leave out a micro-batch of weight 0."""
    hidden_sums: Callable[[], list[Tensor | None]] | None = None
    """What to watch for gradients cleared in mid-window, if the sums of an open window are not in ``.grad``."""
    before_another_backward: Callable[[], None] | None = None
    """Called at a boundary before the second and each later backward of the micro-batch."""
    resuming: Resuming | None = None
    """How an open window is saved and loaded; None if its sums are not whole in ``.grad``, so that it cannot be."""
    reduces_in_hooks = False
    """True if the wrapper itself hangs post-accumulate-grad hooks on its parameters; from others they are refused."""
    shard_group: ProcessGroup | None = None
    """The group over which ``.grad`` is split without being a DTensor (FSDP1), else None."""
    replica_group: ProcessGroup | None = None
    """The group over which reduced gradients are equal, for ``verify=True``; None if there is none."""
    local_names: Collection[str] = ()
    """The parameters of the module that the wrapper leaves to each rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.hooks: list[Removable] = []
        self.users = 0
        self.drop = False
        """Set during a micro-batch of weight 0 whose backward has to run: it must contribute zeros."""
        self.policy = "balanced"
        """What to keep between micro-batches: "memory", "balanced" or "speed"; it changes between windows only."""
        self.disturbed = False
        """Set when a backward reached the module since ``begin``; an exception then breaks the window."""
        self.backwards = 0
        """Backwards that the library ran in this micro-batch; one whose graph may run again counts twice."""

    @property
    @abstractmethod
    def groups(self) -> tuple[ProcessGroup, ...]:
        """The process groups, one per mesh dimension, over which the wrapper averages gradients."""

    @abstractmethod
    def begin(self, reduce: bool) -> None:
        """A micro-batch begins: until ``end()``, a backward reduces gradients only if ``reduce``."""

    @abstractmethod
    def end(self) -> None:
        """The micro-batch ended, perhaps by an exception: put back what ``begin`` found."""

    @abstractmethod
    def finish(self) -> bool:
        """Called after a reducing micro-batch: True if everything accumulated has been reduced."""

    @abstractmethod
    def flush(self) -> None:
        """Reduce what is accumulated, without a micro-batch. Called on all ranks."""

    @abstractmethod
    def reset(self) -> None:
        """Drop what the wrapper has accumulated besides the ``.grad`` of its parameters."""


class Match(NamedTuple):
    """A wrapper in a model, and the class of what steers it."""

    name: str
    module: nn.Module
    control: type[SyncControl]


class Found(NamedTuple):
    """A wrapper in the user's model: its dotted name, and what steers it."""

    name: str
    control: SyncControl


_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule"
_FSDP2_BEFORE_2_7 = "torch.distributed._composable.fsdp.fully_shard.FSDPModule"
_registry: dict[type | str, type[SyncControl] | str] = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "accumulate.wrappers.ddp.DDPControl",
    _FSDP1: "accumulate.wrappers.fsdp1.FSDP1Control",
    _FSDP2: "accumulate.wrappers.fsdp2.FSDP2Control",
    _FSDP2_BEFORE_2_7: "accumulate.wrappers.fsdp2.FSDP2Control",
}
_active: weakref.WeakValueDictionary[int, SyncControl] = weakref.WeakValueDictionary()


def _is_class(given: object, base: type) -> bool:
    return isinstance(given, type) and issubclass(given, base)


def register(wrapper: type[nn.Module] | str, control: type[SyncControl]) -> None:
    """Teach the library a wrapper: every later ``Accumulator`` and ``no_sync`` finds it, subclasses included.

    ``wrapper`` is the class, or its dotted name "package.module.Class" if it should not be imported for it.
    The latest registration wins. Raises ``TypeError`` if ``control`` is no concrete :class:`SyncControl`.
    """
    if not _is_class(control, SyncControl):
        raise TypeError(f"control must be a subclass of accumulate.SyncControl, got {control!r}")
    if missing := ", ".join(sorted(control.__abstractmethods__)):
        raise TypeError(
            f"{control.__name__} does not implement {missing}; SyncControl's docstrings say what each must do"
        )
    if not isinstance(wrapper, str) and not _is_class(wrapper, nn.Module):
        raise TypeError(f"wrapper must be an nn.Module class or its dotted name, got {wrapper!r}")
    _registry.pop(wrapper, None)
    _registry[wrapper] = control


def _resolve(dotted: str) -> Any:
    """The class of that dotted name if its module is imported already, else None."""
    home, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(home), name, None)


def _adapters() -> list[tuple[type, type[SyncControl]]]:
    """Each wrapper class that exists in this process with its adapter, the latest registration first."""
    found = []
    for wrapper, control in reversed(_registry.items()):
        cls = _resolve(wrapper) if isinstance(wrapper, str) else wrapper
        if cls is None:
            continue
        if isinstance(control, str):
            importlib.import_module(control.rpartition(".")[0])
            found.append((cls, _resolve(control)))
        else:
            found.append((cls, control))
    return found


def matches(models: Mapping[str, nn.Module]) -> list[Match]:
    """Every wrapper in ``models``, at any depth, and what would steer it; raises for an unknown one."""
    adapters = _adapters()
    found = []
    covered: set[tuple[type, int]] = set()
    for label, model in models.items():
        for path, module in model.named_modules():
            name = f"{label}.{path}" if path else label
            control = next((c for cls, c in adapters if isinstance(module, cls)), None)
            if control is None:
                refuse_unknown(name, module)
            elif (control, id(module)) not in covered:
                found.append(Match(name, module, control))
                below = module.modules() if control.covers_subtree else (module,)
                covered.update((control, id(m)) for m in below)
    return found


def _refuse_part_of_fsdp1(models: Mapping[str, nn.Module], matches: Sequence[Match]) -> None:
    """Raise for a model whose parameters belong to an FSDP1 instance further up, which owns their reduction."""
    steered = {id(p) for _, module, _ in matches for p in module.parameters()}
    for label, model in models.items():
        for name, param in model.named_parameters():
            if getattr(param, "_fsdp_flattened", False) and id(param) not in steered:
                raise UnsupportedWrapperError(
                    f"{label}.{name} belongs to a FullyShardedDataParallel above {label} ({type(model).__name__}), "
                    "which owns its reduction. Pass the outermost FullyShardedDataParallel module instead."
                )


def acquire(module: nn.Module, control: type[SyncControl]) -> SyncControl:
    """The control of ``module``: the one that is attached already, or a new one."""
    active = _active.get(id(module))
    if active is None:
        active = _active[id(module)] = control(module)
    active.users += 1
    return active


def release(found: Sequence[Found]) -> None:
    """Give controls back; the last user's leaving removes every hook from the module."""
    for _, control in found:
        control.users -= 1
        if control.users == 0:
            for hook in control.hooks:
                hook.remove()
            _active.pop(id(control.module), None)


def find(models: Mapping[str, nn.Module]) -> list[Found]:
    """Every wrapper in ``models``, at any depth; raises :class:`UnsupportedWrapperError` for an unknown one."""
    found: list[Found] = []
    there = matches(models)
    _refuse_part_of_fsdp1(models, there)
    try:
        for name, module, control in there:
            found.append(Found(name, acquire(module, control)))
    except BaseException:
        release(found)
        raise
    return found


def begin(controls: Sequence[SyncControl], reduce: bool) -> None:
    """A micro-batch begins, for all of them or for none."""
    begun = []
    try:
        for control in controls:
            control.begin(reduce)
            begun.append(control)
    except BaseException:
        for control in reversed(begun):
            control.end()
        raise
