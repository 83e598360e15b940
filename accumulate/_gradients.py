"""The ``.grad`` tensors of a model: what happened to them between two blocks, their norm, and one multiply."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ._sync import Found

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AllGradients", "Gradients", "Kept", "Part", "total_norm"]


@dataclass
class Part:
    """Parameters whose gradients are laid out alike: local tensors, DTensors of one mesh, or FSDP1's shards."""

    shard_group: ProcessGroup | None
    params: list[nn.Parameter] = field(default_factory=list)

    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def norm(self, norm_type: float) -> Tensor:
        """The norm of the whole gradient, not of this rank's shard of it."""
        # torch's norm of float16 is a float16, which is infinite above 65504.
        grads = [_norm_in_float32(g, norm_type) if g.dtype == torch.float16 else g for g in self.grads()]
        norm = get_total_norm(grads, norm_type)
        if _is_dtensor(norm):
            norm = norm.full_tensor()  # type: ignore[attr-defined]  # a DTensor's method
        if self.shard_group is None:
            return norm
        # A rank that holds no piece of the gradient has a zero of the default dtype, whatever the others have.
        dtype = torch.float64 if self.params[0].dtype == torch.float64 else torch.float32
        norm = norm.to(self.params[0].device, dtype)
        infinite = norm_type == float("inf")
        power = norm if infinite else norm**norm_type
        op = torch.distributed.ReduceOp.MAX if infinite else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(power, op, group=self.shard_group)
        return power if infinite else torch.pow(power, 1.0 / norm_type)


class Kept:
    """A parameter's gradient as it is now; ``restore`` puts it back into the tensor where the user may look for it."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._grad = grad = param.grad
        self._copy = None if grad is None else grad.clone()
        self._version = -1 if grad is None else grad._version

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has been added since."""
        self._param.grad = self._grad
        if self._grad is not None and self._copy is not None and self._grad._version != self._version:
            self._grad.copy_(self._copy)


class Gradients:
    """The gradients of one user model."""

    def __init__(self, name: str, model: nn.Module, found: Sequence[Found]) -> None:
        self.name = name
        inside = {id(module) for module in model.modules()}
        self.is_wrapped = any(id(control.module) in inside for _, control in found)
        hooked = {id(p) for _, c in found if c.reduces_in_hooks for p in c.module.parameters()}
        self.named = dict(model.named_parameters())
        self.without_hooks = [(path, p) for path, p in self.named.items() if id(p) not in hooked]
        """The parameters that must have no post-accumulate-grad hook."""
        self.params = list(self.named.values())
        self.parts = _partition(self.params, found)
        steered = {id(p) for _, control in found for p in control.module.parameters()}
        self._unsteered = [p for p in self.params if id(p) not in steered]
        hiding = [c for _, c in found if c.hidden_sums is not None and id(c.module) in inside]
        hidden = {id(p) for control in hiding for p in control.module.parameters()}
        self._watched = [p for p in self.params if id(p) not in hidden]
        self._hidden_sums = [control.hidden_sums for control in hiding if control.hidden_sums is not None]
        self._held: tuple[nn.Parameter, Tensor] | None = None
        self._versions: list[int] = []
        self._closed: tuple[nn.Parameter, int] | None = None

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return self.params[0].device if self.params else torch.device("cpu")

    def remember(self) -> None:
        """Note the state of every gradient, so that ``changed`` can tell what happened since."""
        self._versions = self._now()
        self._held = None
        for param in self._watched:
            if (grad := param.grad) is not None:
                self._held = (param, grad)
                break

    def let_go(self) -> None:
        """Do not keep a gradient alive that a reduction or ``zero_grad`` frees."""
        self._held = None

    def close(self) -> None:
        """A window has been closed: from now on its gradient waits for an update."""
        self._closed = next(((p, p._version) for p in self.params if p.grad is not None), None)

    @property
    def is_due(self) -> bool:
        """Whether the closed window's gradient is there, and its first parameter as it was then."""
        return (
            self._closed is not None
            and self._closed[0].grad is not None
            and self._closed[0]._version == self._closed[1]
        )

    def changed(self) -> str | None:
        """What was done to the gradients since ``remember``, in words; None if nothing was."""
        now = self._now()
        if now == self._versions and (self._held is None or _same(self._held[0].grad, self._held[1])):
            return None
        cleared = any(before >= 0 > after for before, after in zip(self._versions, now, strict=True))
        return "cleared (zero_grad?)" if cleared else "changed (a backward outside any block, or zero_grad?)"

    def _now(self) -> list[int]:
        versions = [-1 if (grad := p.grad) is None else grad._version for p in self._watched]
        for sums in self._hidden_sums:
            versions += [-1 if grad is None else grad._version for grad in sums()]
        return versions

    def unsteered(self) -> list[Kept]:
        """The gradients outside every wrapper, which a backward that must contribute nothing may spoil."""
        return [Kept(param) for param in self._unsteered]

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        """Multiply every gradient by the 0-dim ``factor``, in place, without reading it on the host."""
        for part in self.parts:
            if grads := part.grads():
                torch._foreach_mul_(grads, factor.to(grads[0].device))

    def drop(self) -> None:
        """Set every gradient to None."""
        self._held = None
        for param in self.params:
            param.grad = None

    def clip(self, max_norm: float, total: Tensor) -> None:
        """Scale every gradient so that a total norm of ``total`` becomes at most ``max_norm``."""
        for part in self.parts:
            clip_grads_with_norm_(part.params, max_norm, total)


def _norm_of_part(part: Part, norm_type: float) -> Iterable[Tensor]:
    return [part.norm(norm_type)]


class AllGradients(list[Gradients]):
    """Those of all models of one accumulator."""

    def remember(self) -> None:
        """See ``Gradients.remember``."""
        for gradients in self:
            gradients.remember()

    def let_go(self) -> None:
        """See ``Gradients.let_go``."""
        for gradients in self:
            gradients.let_go()

    def drop(self) -> None:
        """See ``Gradients.drop``."""
        for gradients in self:
            gradients.drop()


def total_norm(
    several: Sequence[Gradients],
    norm_type: float,
    norms_of: Callable[[Part, float], Iterable[Tensor]] = _norm_of_part,
) -> Tensor:
    """The norm of all the gradients as one vector, over all their shards."""
    norms = [norm for gradients in several for part in gradients.parts for norm in norms_of(part, norm_type)]
    if len(norms) <= 1:
        return norms[0] if norms else torch.zeros(())
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    every = torch.stack([n.to(norms[0].device, dtype) for n in norms])
    return torch.linalg.vector_norm(every, norm_type)  # type: ignore[no-any-return]  # torch.linalg is untyped


def _norm_in_float32(grad: Tensor, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)  # type: ignore[no-any-return]  # torch.linalg is untyped


def _same(grad: Tensor | None, held: Tensor) -> bool:
    """Whether a gradient is the one that was there before, perhaps as another Python object (FSDP1's views)."""
    if grad is held or grad is None:
        return grad is held
    return grad.layout == held.layout == torch.strided and grad.data_ptr() == held.data_ptr()


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # imported by whatever made the DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def _partition(params: Iterable[nn.Parameter], found: Sequence[Found]) -> list[Part]:
    shards = {id(p): c.shard_group for _, c in found if c.shard_group is not None for p in c.module.parameters()}
    parts: dict[object, Part] = {}
    for param in params:
        group = shards.get(id(param))
        mesh = param.device_mesh if _is_dtensor(param) else None  # type: ignore[attr-defined]  # a DTensor's
        part = parts.setdefault((param.device, mesh, id(group)), Part(group))
        part.params.append(param)
    return list(parts.values())
