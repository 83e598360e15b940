"""torch's ``GradScaler`` with members: accumulators that are asked before it unscales what they have accumulated.

Required: the user may call ``scaler.unscale_`` and ``scaler.step`` himself; accumulators may share a scaler; a copy
or a pickle of it is a plain one. All unscaling in torch goes through ``_unscale_grads_`` (2.6 to 2.13), the fused
optimizers' too, so that is what the members are told of; the scaler's class is exchanged for that, as ``fully_shard``
exchanges a module's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

__all__ = ["Member", "Scaler", "attach", "detach"]

Found = dict[torch.device, Tensor]


class Member(Protocol):
    """Who accumulates with a scaler."""

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has parameters of this member."""

    def before_unscale(self, optimizer: Optimizer) -> None:
        """Raise if the gradients are not complete; else make them hold the scaler's present factor."""

    def agree(self, found: Found) -> None:
        """Let all ranks find what one of them has found."""


class Scaler:
    """A ``GradScaler``, and what torch has no public way to ask it or tell it."""

    def __init__(self, torch_scaler: GradScaler) -> None:
        self.torch_scaler = torch_scaler
        self.members: list[Member] = []
        self._kind = type(torch_scaler)
        sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
        self._sums_itself = sharded is not None and isinstance(torch_scaler, sharded.ShardedGradScaler)
        torch_scaler.__class__ = _with_members(self._kind)

    def remove_members(self) -> None:
        """Leave the scaler as it was found."""
        self.torch_scaler.__class__ = self._kind

    def factor(self, device: torch.device) -> Tensor:
        """The present factor as a tensor of its own, which later updates do not change."""
        return self.torch_scaler.scale(torch.ones((), dtype=torch.float32, device=device))

    def moment(self) -> tuple[int, int]:
        """Differs from an earlier moment if the factor may have changed since."""
        factor = self.torch_scaler._scale
        return (0, 0) if factor is None else (id(factor), factor._version)

    def unscale(self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Found:
        """What ``_unscale_grads_`` does now."""
        members = [member for member in self.members if member.owns(optimizer)]
        for member in members:
            member.before_unscale(optimizer)
        found = self._kind._unscale_grads_(self.torch_scaler, optimizer, inv_scale, found_inf, allow_fp16)
        if members and not found:
            found.update(self._nothing())
        for member in () if self._sums_itself else members:
            member.agree(found)
        return found

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients have been unscaled since the last update."""
        return self.torch_scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def unscale_once(self, optimizer: Optimizer) -> Found:
        """Unscale the optimizer's gradients unless that is done; what was found in them, by device."""
        if not self.is_unscaled(optimizer):
            self.torch_scaler.unscale_(optimizer)
        found: Found = self.torch_scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:
            found.update(self._nothing())
        return found

    def _nothing(self) -> Found:
        """What is found where there is no gradient; torch raises for that, but another rank may hold the pieces."""
        factor = self.torch_scaler._scale
        assert factor is not None  # it has just been used to unscale
        return {factor.device: torch.zeros((), dtype=torch.float32, device=factor.device)}

    def update(self, optimizers: set[int]) -> None:
        """Update the factor by what was found in these optimizers' gradients; what others found waits for theirs."""
        states = self.torch_scaler._per_optimizer_states
        others = {key: states.pop(key) for key in list(states) if key not in optimizers}
        if states:  # else the user has called update()
            self.torch_scaler.update()
        self.torch_scaler._per_optimizer_states.update(others)


_attached: dict[int, Scaler] = {}


def attach(torch_scaler: GradScaler, member: Member) -> Scaler:
    """Make ``member`` one of those whom the scaler asks."""
    scaler = _attached.get(id(torch_scaler))
    if scaler is None:
        scaler = _attached[id(torch_scaler)] = Scaler(torch_scaler)
    scaler.members.append(member)
    return scaler


def detach(scaler: Scaler, member: Member) -> None:
    """The reverse; with its last member gone, the scaler is as it was found."""
    scaler.members.remove(member)
    if not scaler.members:
        scaler.remove_members()
        del _attached[id(scaler.torch_scaler)]


def _new(kind: type[GradScaler]) -> GradScaler:
    return kind.__new__(kind)


def _with_members(kind: type[GradScaler]) -> type[GradScaler]:
    """A class that is ``kind`` in everything but unscaling, and that copies and pickles as ``kind``."""

    def unscale(self: GradScaler, *args: object) -> Found:
        told: Callable[..., Found] = _attached[id(self)].unscale
        return told(*args)

    def reduce(self: GradScaler, protocol: object) -> tuple[object, ...]:
        return _new, (kind,), self.__getstate__()

    return type(kind.__name__, (kind,), {"_unscale_grads_": unscale, "__reduce_ex__": reduce, "__doc__": kind.__doc__})
