"""The data-parallel ranks of an accumulator, and the few small collectives that it sends over them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed as dist

from ._errors import AccumulateError
from ._scaling import precise
from ._sync import Found

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Ranks", "Sum", "accepted_device"]


class Sum:
    """A small vector that is being summed over the ranks; ``result()`` waits for it."""

    def __init__(self, groups: Sequence[ProcessGroup], values: Tensor) -> None:
        self._values = values
        self._work: Work | None = None
        for group in groups:  # both dimensions of an HSDP mesh, one after the other
            self.result()
            self._work = dist.all_reduce(values, group=group, async_op=True)

    def result(self, timeout: timedelta | None = None) -> Tensor:
        """The sum, of which nothing is sent any more; on a device the wait is the stream's, not the host's.

        Raises ``RuntimeError`` if the others have not come within ``timeout``.
        """
        if self._work is not None:
            work, self._work = self._work, None
            work.wait() if timeout is None else work.wait(timeout)
        return self._values


class Ranks:
    """The process groups over which the wrappers average, one per mesh dimension; none for a plain model."""

    def __init__(self, found: Sequence[Found], group: ProcessGroup | None, device: torch.device) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {group!r}")
        self.chosen = group is not None
        """Whether the caller named the group, which then holds for plain models as well."""
        self.groups = _common_groups(found) if group is None else (group,)
        self.size, self.index = 1, 0
        for each in self.groups:
            self.size, self.index = self.size * each.size(), self.index * each.size() + each.rank()
        self.device = accepted_device(self.groups, device)
        self._host = accepted_device(self.groups, torch.device("cpu"))

    def start_sum(self, values: Sequence[float | Tensor], local: bool = False) -> Sum:
        """Begin to sum ``values`` over the ranks, at the same point on each; ``local``: of this rank alone."""
        dtype = precise(self.device)
        parts = [
            v.to(self.device, dtype) if isinstance(v, Tensor) else torch.full((), v, device=self.device, dtype=dtype)
            for v in values
        ]
        return Sum(() if local else self.groups, torch.stack(parts))

    def start_counts(self, own: int, *modes: int) -> Sum:
        """Begin to gather ``own`` of each rank, and to sum ``modes``, on the host if the backend can.

        The result is a vector of ``size`` numbers and the sums. With NCCL alone it lies on the GPU, where reading
        it waits for the work queued before.
        """
        return self.start_rows([own], modes)

    def start_rows(self, own: Sequence[int], sums: Sequence[int] = ()) -> Sum:
        """The same for several numbers of each rank, one rank's after the other's."""
        values = [0] * (self.size * len(own))
        values[self.index * len(own) : (self.index + 1) * len(own)] = own
        return Sum(self.groups, torch.tensor([*values, *sums], device=self._host))

    def agree(self, **facts: object) -> None:
        """Raise :class:`AccumulateError` on every rank if one of the ``facts`` differs between ranks."""
        for group in self.groups:
            every: list[dict[str, object]] = [{} for _ in range(group.size())]
            dist.all_gather_object(every, facts, group=group)
            for key in facts:
                first = every[0][key]
                for rank, theirs in enumerate(every):
                    if theirs[key] != first:
                        raise AccumulateError(
                            f"ranks disagree on {key}: rank {dist.get_global_rank(group, 0)} has {first!r}, "
                            f"rank {dist.get_global_rank(group, rank)} has {theirs[key]!r}. "
                            "Construct the Accumulator with the same arguments on every rank."
                        )


def _common_groups(found: Sequence[Found]) -> tuple[ProcessGroup, ...]:
    """The groups that all wrappers share; weights can be summed only if they average over the same ranks."""
    by_ranks = {tuple(tuple(dist.get_process_group_ranks(g)) for g in c.groups): (name, c.groups) for name, c in found}
    if len(by_ranks) > 1:
        named = "; ".join(f"{name} over ranks {ranks}" for ranks, (name, _) in by_ranks.items())
        raise AccumulateError(
            f"the wrappers average over different ranks ({named}), so one window has no single denominator. "
            "Pass group=, or use one Accumulator for each."
        )
    return next((groups for _, groups in by_ranks.values()), ())


def accepted_device(groups: Sequence[ProcessGroup], device: torch.device) -> torch.device:
    """``device`` if the groups' backend takes tensors from there, else one from which it does."""
    if not groups or any(d.type == device.type for d in groups[0]._device_types):
        return device
    kind: torch.device = groups[0]._device_types[0]
    return kind if kind.type == "cpu" else torch.device(kind.type, torch.accelerator.current_device_index())
