"""What a window makes a rank hand to collectives, and what it holds between micro-batches: formulas, nothing else.

A window of N micro-batches on a model of P parameters, of which forward leaves ``kept`` unsharded until backward (the
root unit's; all of them with ``reshard_after_forward=False`` or SHARD_GRAD_OP). Sharded wrappers gather

    first + (N - 1) * later + N * backward

parameters: in the first forward, in each later one, and in each backward. Gradients are reduced at the boundary, or in
each micro-batch. ``tests/distributed/test_plan_volume.py`` compares all of it with what real ranks send and hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EACH", "POLICIES", "WRAPPERS", "Held", "Model", "Schedule", "Volume", "held", "schedule", "volume"]

WRAPPERS = ("ddp", "fsdp1", "fsdp2", "hsdp")
POLICIES = ("memory", "balanced", "speed")
EACH = "each"
"""No policy of the library's: a loop that lets the wrapper reduce each micro-batch, to compare with."""


@dataclass(frozen=True)
class Model:
    """A wrapped model: sizes in parameters, widths in bytes per parameter."""

    parameters: int
    root: int = 0
    """Parameters of the root unit, which forward does not reshard."""
    layers: int = 32
    """The units below the root."""
    stored: int = 4
    """Width of a parameter as the optimizer updates it."""
    gathered: int = 4
    """Width of a parameter in all-gathers and in compute: ``param_dtype`` of FSDP's mixed precision."""
    reduced: int = 4
    """Width of a gradient in reductions: ``reduce_dtype``, or what a compressing hook of DDP makes of it."""
    optimizer: int = 8
    """Bytes of optimizer state for each parameter; AdamW in float32 has 8."""
    reshard: bool = True
    """Whether forward reshards the units below the root."""

    @property
    def kept(self) -> int:
        """The parameters that stay unsharded from forward to backward."""
        return self.root if self.reshard else self.parameters


class Schedule(NamedTuple):
    """When a wrapper communicates under a policy, as parameters gathered, and what it keeps in between."""

    first: int = 0
    later: int = 0
    backward: int = 0
    scatters_each: bool = False
    """Whether gradients are reduce-scattered in each micro-batch; else at the boundary."""
    sums_each: bool = False
    """Whether they are all-reduced in each micro-batch (DDP; HSDP between replicas); else at the boundary."""
    keeps: bool = False
    """Whether parameters stay unsharded between micro-batches."""


class Volume(NamedTuple):
    """Bytes that a rank hands to collectives in one window: the full-sized side, whatever the algorithm then sends."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0


class Held(NamedTuple):
    """Bytes that a rank holds between the micro-batches of a window; activations come on top."""

    parameters: float
    """As the optimizer sees them: this rank's shard, or all."""
    unsharded: float
    """Gathered parameters that were not resharded."""
    gradients: float
    """The sum of the window so far; DDP's buckets included."""
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def schedule(model: Model, wrapper: str, policy: str) -> Schedule:
    """When ``wrapper`` communicates under ``policy``."""
    each = policy == EACH
    if wrapper == "ddp":
        return Schedule(sums_each=each)
    everything, again = model.parameters, model.parameters - model.kept
    if each or policy == "memory":
        return Schedule(everything, everything, again, scatters_each=True, sums_each=each)
    if wrapper == "fsdp1":  # has no flag of its own to keep parameters: its sharding strategy decides
        later = everything if model.reshard else 0
        return Schedule(everything, later, again, keeps=not model.reshard)
    return Schedule(everything, 0, 0 if policy == "speed" else again, keeps=True)


def volume(model: Model, wrapper: str, policy: str, steps: int, shards: int) -> Volume:
    """What one window of ``steps`` micro-batches hands to collectives, with each parameter in ``shards`` pieces."""
    when = schedule(model, wrapper, policy)
    gathered = when.first + (steps - 1) * when.later + steps * when.backward
    scatters = 0 if wrapper == "ddp" else steps if when.scatters_each else 1
    sums = 0 if wrapper.startswith("fsdp") else steps if when.sums_each else 1
    gradient = model.parameters * model.reduced
    return Volume(gathered * model.gathered, scatters * gradient, sums * gradient / shards)


def held(model: Model, wrapper: str, policy: str, shards: int) -> Held:
    """What a rank holds between two micro-batches of one window."""
    size, piece = model.parameters, model.parameters / shards
    when = schedule(model, wrapper, policy)
    if wrapper == "ddp":
        gradients = 2.0 * size * model.stored  # .grad and the buckets, which gradient_as_bucket_view would make one
    elif not when.scatters_each:
        gradients = size * (model.gathered if wrapper == "fsdp1" else model.reduced)
    else:  # HSDP's pieces wait for the all-reduce in the dtype that it will have
        gradients = piece * (model.reduced if wrapper == "hsdp" and not when.sums_each else model.stored)
    unsharded = size * model.gathered if when.keeps else 0
    return Held(piece * model.stored, unsharded, gradients, piece * model.optimizer)
