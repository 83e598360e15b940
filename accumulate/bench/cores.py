"""One core for each rank, on different physical cores as far as there are enough."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> list[int]:
    """The CPUs that this process may use, one of each physical core first, then their hyper-threads."""
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows have no affinity: let the system place the ranks
        return list(range(os.cpu_count() or 1))
    usable = sorted(os.sched_getaffinity(0))
    return sorted(usable, key=lambda cpu: (_siblings(cpu, usable).index(cpu), cpu))


def pin(rank: int) -> None:
    """Keep this process, its helper threads included, on the core that belongs to ``rank``."""
    if hasattr(os, "sched_setaffinity"):
        usable = cores()
        os.sched_setaffinity(0, {usable[rank % len(usable)]})


def _siblings(cpu: int, usable: list[int]) -> list[int]:
    """The usable CPUs that share a physical core with ``cpu``, itself included."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    found: set[int] = {cpu}
    if path.exists():
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return [other for other in usable if other in found]
