"""What the library costs per micro-batch, against the loop that a user would write by hand.

    python benchmarks/overhead.py            the table
    python benchmarks/overhead.py --check    and exit with 1 if a target is missed

Each micro-batch is timed by itself. The loops take turns, one window each, and the table shows medians:
compare the columns of one row, not rows of different runs. Accelerate and Fabric have rows if installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from accumulate import Accumulator

STEPS = 8
Micro = Callable[[Tensor, bool], None]  # one micro-batch: its input, and whether it closes the window


@dataclass(frozen=True)
class Row:
    """Two ways to do the same, and the limit (in the row's unit) of what the second may cost."""

    name: str
    unit: str
    hand: float
    ours: float
    limit: float
    difference: bool = True  # the limit is on the difference, not on the second column

    @property
    def met(self) -> bool:
        return (self.ours - self.hand if self.difference else self.ours) <= self.limit

    def __str__(self) -> str:
        ratio = f"{self.ours / self.hand:.2f}" if self.hand else "-"
        what = "more" if self.difference else "ours"
        verdict = f"{'met' if self.met else 'MISSED'}: {what} <= {self.limit:g}" if self.limit < float("inf") else ""
        columns = f"{self.hand:8.2f} {self.ours:8.2f} {self.ours - self.hand:+8.2f} {ratio:>6}"
        return f"{self.name:46} {columns} {self.unit:4} {verdict}".rstrip()


# -- loops --


def hand_written(model: nn.Module) -> Micro:
    """What the loop looks like without a library: flags and a division."""

    def micro(x: Tensor, last: bool) -> None:
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
            (model(x).mean() / STEPS).backward()

    return micro


def accumulated(model: nn.Module) -> Micro:
    acc = Accumulator(model, STEPS)

    def micro(x: Tensor, last: bool) -> None:
        with acc.step():
            acc.backward(model(x).mean())

    return micro


def accumulated_with_weights(model: nn.Module) -> Micro:
    acc = Accumulator(model, STEPS)

    def micro(x: Tensor, last: bool) -> None:
        with acc.step():
            acc.backward(model(x).mean(), weight=len(x))

    return micro


def fabric(model: nn.Module) -> Micro:
    engine = importlib.import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    wrapped = engine.setup(model)

    def micro(x: Tensor, last: bool) -> None:
        with engine.no_backward_sync(wrapped, enabled=not last):
            engine.backward(wrapped(x).mean() / STEPS)

    return micro


def accelerate(model: nn.Module) -> Micro:
    engine = importlib.import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    wrapped = engine.prepare(model)

    def micro(x: Tensor, last: bool) -> None:
        with engine.accumulate(wrapped):
            engine.backward(wrapped(x).mean())

    return micro


PEERS = {"lightning_fabric": fabric, "accelerate": accelerate}


# -- measuring --


def interleave(models: list[nn.Module], micros: list[Micro], windows: int) -> list[tuple[float, float]]:
    """For each loop the median time in µs of a micro-batch off the boundary, and of one at it."""
    x = torch.randn(4, 8)
    off: list[list[float]] = [[] for _ in micros]
    at: list[list[float]] = [[] for _ in micros]
    for window in range(windows):
        for turn in range(len(micros)):
            index = (turn + window) % len(micros)
            for position in range(STEPS):
                last = position == STEPS - 1
                start = time.perf_counter()
                micros[index](x, last)
                (at if last else off)[index].append(1e6 * (time.perf_counter() - start))
            models[index].zero_grad()
    return [(median(o), median(a)) for o, a in zip(off, at, strict=True)]


def compare(name: str, wrap: Callable[[nn.Module], nn.Module], windows: int) -> list[Row]:
    """A hand-written loop and ours, each with its own model."""
    models = [wrap(nn.Linear(8, 8)) for _ in range(3)]
    micros = [hand_written(models[0]), accumulated(models[1]), accumulated_with_weights(models[2])]
    interleave(models, micros, windows // 10)
    hand, ours, weighted = interleave(models, micros, windows)

    def mean(times: tuple[float, float]) -> float:
        return ((STEPS - 1) * times[0] + times[1]) / STEPS

    return [
        Row(f"{name}: off the boundary", "µs", hand[0], ours[0], 25),
        Row(f"{name}: at the boundary", "µs", hand[1], ours[1], float("inf")),
        Row(f"{name}: per micro-batch of {STEPS}", "µs", mean(hand), mean(ours), 25),
        Row(f"{name}: off the boundary, weight=", "µs", hand[0], weighted[0], float("inf")),
    ]


def peers(windows: int) -> list[Row]:
    rows = []
    for module, build in PEERS.items():
        if importlib.util.find_spec(module):
            models: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 8)]
            micros = [hand_written(models[0]), build(models[1])]
            interleave(models, micros, windows // 10)
            hand, theirs = interleave(models, micros, windows)
            rows.append(Row(f"plain: off the boundary, {module}", "µs", hand[0], theirs[0], float("inf")))
    return rows


def allocations(wrap: Callable[[nn.Module], nn.Module], loop: Callable[[nn.Module], Micro]) -> int:
    """Allocations in one window that are at least as large as the one large gradient of the model."""
    model = wrap(nn.Linear(512, 512, bias=False))
    micro, x = loop(model), torch.randn(2, 512)
    for position in range(3 * STEPS):  # buckets are rebuilt and workspaces made in the first windows
        micro(x, position % STEPS == STEPS - 1)
        if position % STEPS == STEPS - 1:
            model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for position in range(STEPS):
            micro(x, position == STEPS - 1)
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler recorded no allocation"
    return sum(event.nbytes() >= 512 * 512 * 4 for event in events)


def memory(name: str, wrap: Callable[[nn.Module], nn.Module]) -> list[Row]:
    hand = allocations(wrap, hand_written)
    loops = {"": accumulated, ", weight=": accumulated_with_weights}
    return [
        Row(f"{name}: gradient-sized allocations{suffix}", "", hand, allocations(wrap, loop), 0)
        for suffix, loop in loops.items()
    ]


def fsdp2_flags(blocks: int = 160, times: int = 300) -> list[Row]:
    """Entering and leaving a micro-batch of a model of 321 modules, against torch's own recursive setter."""
    from torch.distributed.fsdp import fully_shard  # not at the top: the import time of the rest is measured

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(blocks)))
    for block in model:
        fully_shard(block)
    sharded = fully_shard(model)
    with torch.no_grad():
        model(torch.randn(2, 4))  # the first forward sets the states up
    acc = Accumulator(model, 10**9)
    hand, ours = [], []
    for _ in range(times):
        start = time.perf_counter()
        sharded.set_requires_gradient_sync(False)
        sharded.set_requires_gradient_sync(True)
        hand.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
        with acc.step():
            pass
        ours.append(1e3 * (time.perf_counter() - start))
    count = sum(1 for _ in model.modules())
    return [Row(f"FSDP2: flags of {count} modules, set and put back", "ms", median(hand), median(ours), 0.3, False)]


def import_time(times: int = 5) -> list[Row]:
    """In fresh interpreters, after ``import torch``; fails if FSDP came along."""
    code = (
        "import sys, time, torch; start = time.perf_counter(); import accumulate;"
        "print(1e3 * (time.perf_counter() - start), int('torch.distributed.fsdp' in sys.modules))"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(times)]
    spent, came = zip(*(map(float, run.split()) for run in runs), strict=True)
    return [
        Row("import accumulate, after import torch", "ms", 0.0, median(spent), 50, False),
        Row("imports of torch.distributed.fsdp by it", "", 0.0, sum(came), 0),
    ]


# -- ranks --


def on_ranks(rank: int, world: int, folder: str, windows: int, rows: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    name = f"DDP, {world} rank{'s' if world > 1 else ''}"
    found = compare(name, DistributedDataParallel, windows)
    if world == 1:
        found += memory(name, DistributedDataParallel) + fsdp2_flags()
    if rank == 0:
        rows.put(found)
    dist.barrier()
    dist.destroy_process_group()


def spawned(world: int, windows: int) -> list[Row]:
    rows: Any = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        start: Any = spawn  # torch does not type it
        start(on_ranks, (world, str(Path(folder)), windows, rows), nprocs=world)
    found: list[Row] = rows.get()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--windows", type=int, default=400, help=f"of {STEPS} micro-batches a loop (default: 400)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':46} {'by hand':>8} {'ours':>8} {'more':>8} {'ratio':>6}")
    missed = 0
    parts: list[Callable[[], list[Row]]] = [
        lambda: compare("plain", lambda model: model, options.windows),
        lambda: memory("plain", lambda model: model),
        lambda: spawned(1, options.windows),
        lambda: spawned(2, options.windows),
        import_time,
        lambda: peers(options.windows),
    ]
    for part in parts:
        for row in part():
            print(row, flush=True)
            missed += not row.met
    print(f"{missed} targets missed" if missed else "all targets met")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
