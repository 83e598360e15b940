"""What the ranks tell each other before one of them loads a state: all load, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import distributed as dist

from ._errors import AccumulateError
from ._lookahead import Rest
from ._tally import Tally

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Report", "agree", "exchange", "expect_rest"]


class Report(NamedTuple):
    """What the others have to know about the state that one rank is about to load."""

    rank: int
    problem: str | None = None
    updates: int = 0
    mean_weight: float | None = None
    is_own: bool = False
    """Whether this rank saved it, among as many as there are now."""
    open: tuple[int, float] | None = None
    """The micro-batches of its open window that count, and their weight."""
    reordered: frozenset[str] = frozenset()
    """The wrappers that would add up in another order than before."""


def exchange(groups: Sequence[ProcessGroup], mine: Report) -> list[Report]:
    """The reports of all ranks, in the same order on each."""
    every = [mine]
    for group in groups:  # both dimensions of an HSDP mesh, one after the other
        parts: list[list[Report]] = [[] for _ in range(group.size())]
        dist.all_gather_object(parts, every, group=group)
        every = [report for part in parts for report in part]
    return every


def agree(every: Sequence[Report]) -> None:
    """Raise if a rank cannot load its state, or if states are of different moments."""
    first, *others = every
    for each in (first, *others):
        if each.problem is not None:
            raise AccumulateError(f"rank {each.rank} could not load its state, so none was loaded: {each.problem}")
    for each in others:
        for what in ("updates", "mean_weight"):
            here, there = getattr(first, what), getattr(each, what)
            if here != there:
                raise AccumulateError(
                    f"ranks disagree on {what}: the state of rank {first.rank} has {here!r}, that of rank {each.rank} "
                    f"{there!r}. Load states that were saved at the same point; none was loaded."
                )


def expect_rest(tally: Tally, every: Sequence[Report]) -> None:
    """Let a window that was known ahead go on with exact scales if the rest of it comes."""
    seen = [report.open for report in every if report.open is not None]
    if tally.planned is None or tally.by_hand or len(seen) < len(every):
        return
    counted = tally.state()["counted"]
    weight = None if counted is None else counted.item() - sum(weight for _, weight in seen)
    tally.expect(Rest(tally.steps - tally.position, tally.planned - sum(real for real, _ in seen), weight))
