"""``verify=True``: at each boundary, do all ranks close the same window, and do they hold the same gradient?

It costs, for each window: two small all-reduces that the host waits for, two passes over the gradients (a sum and a
norm), and one write to the process group's store for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed as dist

from ._errors import AccumulateError, WindowError
from ._ranks import Ranks, accepted_device
from ._sync import Found
from ._tally import Tally

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Verifier"]

_UNEQUAL = -1


class Verifier:
    """Compares ranks; does nothing where there is one."""

    def __init__(self, ranks: Ranks, found: Sequence[Found], seconds: float) -> None:
        self._ranks = ranks
        self._found = found
        self._timeout = timedelta(seconds=seconds)
        store: Callable[[], Any] = dist.distributed_c10d._get_default_store  # torch 2.13 has no public way to it
        self._store = store() if ranks.size > 1 else None

    def enter(self, update: int, window: Tally, closes: bool, counted: bool) -> None:
        """A micro-batch begins; where it closes the window, raise on every rank unless all close that window."""
        if self._store is not None:
            place = f"micro-batch {window.position + 1} of {window.steps} in window {update}"
            self._store.set(f"accumulate/{dist.get_rank()}", place)
            if closes:
                self._meet(update, window, counted)

    def _meet(self, update: int, window: Tally, counted: bool) -> None:
        mode = {None: 0, False: 1, True: 2}[window.weighted]
        place = [update, window.position if counted else _UNEQUAL, window.steps if counted else _UNEQUAL, mode]
        try:
            rows = self._ranks.start_rows(place).result(self._timeout).view(self._ranks.size, -1).tolist()
        except RuntimeError as error:
            raise WindowError(
                f"not every rank has come to the end of window {update} within {self._timeout.total_seconds():g} s: "
                f"{self._places()}. They run unequal numbers of micro-batches, or one has failed; acc.batches(loader) "
                "keeps unequal ranks in step."
            ) from error
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise WindowError(
                    f"ranks close different windows: rank 0 of {self._ranks.size} has {_place(rows[0])}, rank {rank} "
                    f"has {_place(row)}. All must run the same windows, with or without weights; reset() drops it."
                )

    def _places(self) -> str:
        assert self._store is not None  # one rank never waits
        seen = []
        for rank in range(dist.get_world_size()):
            key = f"accumulate/{rank}"
            where = self._store.get(key).decode() if self._store.check([key]) else "no micro-batch yet"
            seen.append(f"rank {rank} is at {where}")
        return ", ".join(seen)

    def compare(self) -> None:
        """Raise on every rank unless all copies of each gradient are equal, bit for bit."""
        for name, control in self._found:
            if control.replica_group is not None and control.replica_group.size() > 1:
                params = control.module.named_parameters()
                named = [(key, p.grad) for key, p in params if p.requires_grad and key not in control.local_names]
                if named:  # not while all of it is frozen
                    _compare([(f"{name}.{key}", grad) for key, grad in named], control.replica_group)


def _place(row: Sequence[int]) -> str:
    update, position, steps, mode = row
    at = "closed by hand" if position == _UNEQUAL else f"at micro-batch {position + 1} of {steps}"
    return f"window {update} {at}, {('no losses yet', 'losses without weights', 'losses with weights')[mode]}"


def _compare(named: Sequence[tuple[str, Tensor | None]], group: ProcessGroup) -> None:
    prints = _fingerprints([grad for _, grad in named]).to(accepted_device((group,), torch.device("cpu")))
    both = torch.cat([prints, -prints])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both.chunk(2)
    if wrong := (highest != -lowest).any(dim=1).nonzero().flatten().tolist():
        every: list[list[float]] = [[] for _ in range(group.size())]
        dist.all_gather_object(every, prints[wrong[0]].tolist(), group=group)
        norms = ", ".join(f"rank {r}: {'none' if n < 0 else f'{n:.6g}'}" for r, (_, n) in enumerate(every))
        raise AccumulateError(
            f"the gradient of {named[wrong[0]][0]} is not the same on all ranks (norms of {norms}), nor are those of "
            f"{len(wrong) - 1} other parameters. Something changed it on some ranks only, or it was not reduced."
        )


def _fingerprints(grads: Sequence[Tensor | None]) -> Tensor:
    """For each gradient its sum and its norm, (gradients, 2); a norm of -1 if there is none."""
    local = [None if g is None else getattr(g, "_local_tensor", g) for g in grads]
    rows = [
        torch.tensor([0.0, -1.0], dtype=torch.float64)
        if g is None
        else torch.stack([g.sum(), torch.linalg.vector_norm(g)]).double().cpu()
        for g in local
    ]
    return torch.nan_to_num(torch.stack(rows), nan=-2.0)
