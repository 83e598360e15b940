"""How long a window takes on a cluster, and how many micro-batches make its communication small.

A ring over n ranks moves (n - 1)/n of the payload through each rank for an all-gather or a reduce-scatter, and twice
that for an all-reduce, which is one after the other; a double binary tree moves the same in fewer steps. A ring passes
each node's border once, so of the k ranks that a node has in a group one sends to another node. A step costs a latency,
and the slowest link sets the pace. What overlaps with what is in :func:`parts`; docs/plan.md has the sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from accumulate.plan.volume import Model, Volume, schedule, volume

__all__ = ["Cluster", "Forecast", "Group", "Job", "Parts", "forecast", "limit", "parts", "smallest"]

BUCKET = 25 * 2**20
"""DDP's bucket_cap_mb, in bytes."""
LONGEST = 100_000
"""A window that would have to be longer than this is none."""
FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a micro-batch's compute: backward multiplies two matrices for each one of forward."""


@dataclass(frozen=True)
class Cluster:
    """Bandwidths in bytes per second and in one direction, the latency in seconds."""

    nodes: int
    ranks_per_node: int
    within: float
    """Of one rank to the others of its node."""
    between: float
    """Of one node to the others: all its links together, which its ranks share."""
    latency: float = 0.0
    """Of one step of a collective."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.ranks_per_node


class Group(NamedTuple):
    """The ranks of one collective, and how many of them are on each node."""

    size: int
    per_node: int


@dataclass(frozen=True)
class Job:
    """A model under a wrapper on a cluster, and the seconds that one micro-batch computes."""

    model: Model
    wrapper: str
    cluster: Cluster
    compute: float
    shards: int = 1
    """The pieces of each parameter: 1 for DDP, all ranks for FSDP, one mesh dimension for HSDP."""
    overlap: bool = True
    """Whether collectives and compute run at once, as on GPUs."""

    @property
    def share(self) -> float:
        """What one collective of many carries: a unit of FSDP, a bucket of DDP."""
        gradients = self.model.parameters * self.model.stored
        return min(1.0, BUCKET / gradients) if self.wrapper == "ddp" else 1 / (self.model.layers + 1)

    @property
    def sharding(self) -> Group:
        """The ranks that hold one copy of the model together: neighbours, so on as few nodes as possible."""
        return Group(self.shards, min(self.shards, self.cluster.ranks_per_node))

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same piece of different copies."""
        return Group(self.cluster.ranks // self.shards, max(1, self.cluster.ranks_per_node // self.shards))


class Parts(NamedTuple):
    """Seconds of communication in each part of a window."""

    first_forward: float
    later_forward: float
    backward: float
    boundary_backward: float


class Forecast(NamedTuple):
    """One window: what a rank hands over and sends, in bytes, and how long things take, in seconds."""

    payload: Volume
    sent: Volume
    between: float
    """What of ``sent`` leaves the node, on average over its ranks."""
    sending: float
    """Collectives alone, hidden behind compute or not."""
    seconds: float
    efficiency: float
    """Compute over ``seconds``: 1 if all communication is hidden."""

    @property
    def within(self) -> float:
        """What of ``sent`` stays in the node."""
        return sum(self.sent) - self.between


def _moved(payload: float, group: Group, passes: int) -> float:
    """Bytes that a rank sends: each pass around the ring takes (n - 1)/n of the payload."""
    return passes * payload * (group.size - 1) / group.size


def _between(moved: float, group: Group) -> float:
    """The part that leaves the node: in a ring one of the ranks that a node has in the group sends to another node."""
    return moved / group.per_node if group.size > group.per_node else 0.0


def _seconds(payload: float, group: Group, passes: int, messages: float, cluster: Cluster) -> float:
    if group.size == 1 or not payload:
        return 0.0
    moved = _moved(payload, group, passes)
    steps = 2 * math.ceil(math.log2(group.size)) if passes == 2 else group.size - 1  # a tree, and a ring
    inside = moved / cluster.within if group.per_node > 1 else 0.0
    outside = _between(moved, group) * cluster.ranks_per_node / cluster.between  # all ranks of the node at once
    return max(inside, outside) + steps * messages * cluster.latency


def _gather(job: Job, parameters: int) -> float:
    messages = math.ceil(parameters / job.model.parameters / job.share - 1e-9)
    return _seconds(parameters * job.model.gathered, job.sharding, 1, messages, job.cluster)


def _reduce(job: Job, scatter: bool, add: bool) -> float:
    gradient, messages = job.model.parameters * job.model.reduced, math.ceil(1 / job.share - 1e-9)
    scattering = _seconds(gradient, job.sharding, 1, messages, job.cluster) if scatter else 0.0
    return scattering + (_seconds(gradient / job.shards, job.replicas, 2, messages, job.cluster) if add else 0.0)


def parts(job: Job, policy: str) -> Parts:
    """Communication by what it can hide behind: gathers of a forward behind it, all else behind its backward."""
    when = schedule(job.model, job.wrapper, policy)
    again, is_sharded, is_replicated = _gather(job, when.backward), job.wrapper != "ddp", job.wrapper in ("ddp", "hsdp")
    return Parts(
        _gather(job, when.first),
        _gather(job, when.later),
        again + _reduce(job, when.scatters_each, when.sums_each and is_replicated),
        again + _reduce(job, is_sharded, is_replicated),
    )


def _window(job: Job, policy: str) -> tuple[float, float]:
    """Seconds of a window of one micro-batch, and of each further one: N of them take first + (N - 1) * further."""
    spent = parts(job, policy)
    forward, backward = job.compute * FORWARD, job.compute * BACKWARD
    share = job.share if job.overlap else 1.0
    first = _both(forward, spent.first_forward, share) + _both(backward, spent.boundary_backward, share)
    return first, _both(forward, spent.later_forward, share) + _both(backward, spent.backward, share)


def _both(compute: float, communication: float, share: float) -> float:
    """Seconds of the two at once: nothing is left for the last reduction to hide behind, nor for the first gather."""
    return max(compute + share * communication, share * compute + communication)


def forecast(job: Job, policy: str, steps: int) -> Forecast:
    """What a window of ``steps`` micro-batches costs."""
    payload, spent = volume(job.model, job.wrapper, policy, steps, job.shards), parts(job, policy)
    ways = ((job.sharding, 1), (job.sharding, 1), (job.replicas, 2))
    sent = Volume(*(_moved(size, group, passes) for size, (group, passes) in zip(payload, ways, strict=True)))
    between = sum(_between(size, group) for size, (group, _) in zip(sent, ways, strict=True))
    sending = spent.first_forward + spent.boundary_backward + (steps - 1) * (spent.later_forward + spent.backward)
    first, further = _window(job, policy)
    seconds = first + (steps - 1) * further
    return Forecast(payload, sent, between, sending, seconds, steps * job.compute / seconds)


def limit(job: Job, policy: str) -> float:
    """The efficiency that ever longer windows approach: below 1 if micro-batches off the boundary wait, too."""
    return job.compute / _window(job, policy)[1]


def smallest(job: Job, policy: str, efficiency: float) -> int | None:
    """The smallest window that reaches ``efficiency``; None if none does, or none that anybody would use."""
    first, further = _window(job, policy)
    gain = job.compute - efficiency * further  # what each further micro-batch adds to reach it
    if gain * LONGEST < efficiency * (first - further):
        return None
    about = math.ceil(efficiency * (first - further) / gain) if gain else 1
    near = range(max(1, about - 1), about + 2)  # rounding may shift it by one
    return next((steps for steps in near if forecast(job, policy, steps).efficiency >= efficiency), None)
