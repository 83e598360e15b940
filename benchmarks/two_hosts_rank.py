"""What each host of two_hosts.py runs, under torchrun: every loop in turns, timed, and its bytes on the link.

The process group is as a real cluster's: from the environment that torchrun sets, over the one interface there is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accumulate.bench.cores import pin
from accumulate.bench.plan import ACCUMULATE, EVERY, HAND, SILENT, Mode, Options, windows
from accumulate.bench.worker import Facts, Job, Rank

MODES = (SILENT, ACCUMULATE, HAND, EVERY)  # the slow one last, so that the first is as recent as can be


def sent_bytes(interface: str) -> int:
    """What the interface has sent so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {interface} on this host")


def slowest(seconds: float) -> float:
    """The largest of the ranks' values."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def sample(rank: Rank, mode: Mode, steps: int, interface: str) -> dict[str, float]:
    """Seconds and bytes of one window, from as many as give the clock something to see."""
    count = windows(steps)
    before = sent_bytes(interface)
    seconds = slowest(rank.time(Job(mode, steps, count)))
    return {"seconds": seconds / count, "bytes": (sent_bytes(interface) - before) / count}


def measure(options: Options, interface: str) -> dict[str, Any]:
    rank = Rank(options, dist.get_rank(), torch.device("cpu"))
    for mode in (SILENT, EVERY):  # the first windows build optimizer state and buckets
        rank.time(Job(mode, steps=1, windows=2))
    samples: dict[str, list[dict[str, float]]] = {}
    for done in range(options.rounds or 1):
        for steps in options.steps:
            for mode in MODES:
                samples.setdefault(f"{mode.name} {steps}", []).append(sample(rank, mode, steps, interface))
        if dist.get_rank() == 0:
            print(f"  round {done + 1} of {options.rounds}", file=sys.stderr, flush=True)
    facts = rank(None)
    assert isinstance(facts, Facts)
    traffic = rank.count(Job(ACCUMULATE, max(options.steps), count=True))
    return {"parameters": facts.parameters, "reduced": traffic.reduced, "samples": samples}


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    pin(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    try:
        found = measure(Options(**given["options"]), given["interface"])
        if dist.get_rank() == 0:
            Path(given["result"]).write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
