"""What `batches()` and weights cost, against the same windows written by hand, under DDP on two ranks.

    python benchmarks/data.py

A model whose micro-batch takes about ten milliseconds runs windows of eight in turn: by hand; with `step()` alone;
through `batches()` with a length, without one, with weights, with weights counted ahead. The table shows each loop's
median over the hand-written one's. The last line times the correction of a closed weighted window (one small
all-reduce and one multiply of all gradients) on the model of `python -m accumulate bench`, as a share of its window.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from accumulate import Accumulator
from accumulate.bench.model import GPT

STEPS = 8
Run = Callable[[list[Tensor]], None]  # one window


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))


def by_hand(model: DistributedDataParallel) -> Run:
    def window(batches: list[Tensor]) -> None:
        with model.no_sync():
            for x in batches[:-1]:
                (model(x).square().mean() / STEPS).backward()
        (model(batches[-1]).square().mean() / STEPS).backward()

    return window


def unsized(items: list[Tensor]) -> Iterator[Tensor]:
    yield from items


def accumulated(model: nn.Module, source: str, weights: str) -> Run:
    acc = Accumulator(model, STEPS)

    def window(batches: list[Tensor]) -> None:
        items: Any = batches if source != "unsized" else unsized(batches)
        for x in items if source == "step" else acc.batches(items, weight=len if weights == "ahead" else None):
            with acc.step():
                acc.backward(model(x).square().mean(), weight=len(x) if weights else None)

    return window


LOOPS: dict[str, Callable[[DistributedDataParallel], Run]] = {
    "by hand": by_hand,
    "step()": lambda model: accumulated(model, "step", ""),
    "batches(), sized": lambda model: accumulated(model, "sized", ""),
    "batches(), unsized": lambda model: accumulated(model, "unsized", ""),
    "step() and weights": lambda model: accumulated(model, "step", "late"),
    "batches(), unsized, weights": lambda model: accumulated(model, "unsized", "late"),
    "batches(weight=fn), unsized": lambda model: accumulated(model, "unsized", "ahead"),
}


def loops(rounds: int) -> dict[str, float]:
    """The median time of a micro-batch of each loop, in ms."""
    models = [DistributedDataParallel(net()) for _ in LOOPS]
    runs = [build(model) for build, model in zip(LOOPS.values(), models, strict=True)]
    times: list[list[float]] = [[] for _ in runs]
    batches = [torch.randn(96, 256) for _ in range(STEPS)]
    for turn in range(rounds + 2):
        for shift in range(len(runs)):
            index = (shift + turn) % len(runs)
            dist.barrier()
            start = time.perf_counter()
            runs[index](batches)
            if turn >= 2:  # buckets are built in the first windows
                times[index].append(1e3 * (time.perf_counter() - start) / STEPS)
            models[index].zero_grad()
    return dict(zip(LOOPS, map(median, times), strict=True))


def correction(rounds: int) -> float:
    """The share of the correction in a weighted window of eight on the benchmark's model."""
    model = DistributedDataParallel(GPT(vocabulary=16, tokens=65, layers=6, width=512, heads=8))
    acc = Accumulator(model, STEPS)
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(16, (4, 65), generator=draw) for _ in range(STEPS)]
    apply = acc._windows.correction.apply  # the one private name here: what is timed is this call
    spent: list[float] = []

    def timed(tally: Any) -> None:
        start = time.perf_counter()
        apply(tally)
        spent.append(time.perf_counter() - start)

    acc._windows.correction.apply = timed  # type: ignore[method-assign]  # to time it in its place
    windows = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for tokens in batches:
            with acc.step():
                acc.backward(model(tokens), weight=tokens.numel())
        windows.append(time.perf_counter() - start)
        model.zero_grad()
    return median(spent[1:]) / median(windows[1:])


def on_rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    times, share = loops(rounds), correction(max(3, rounds // 10))
    if rank == 0:
        print(f"a micro-batch by hand: {times['by hand']:.1f} ms; the others, over that:")
        for name, spent in times.items():
            print(f"  {name:30} {spent / times['by hand']:.3f}")
        print(f"the correction of a weighted window of {STEPS} on the benchmark's model: {share:.2%} of the window")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="windows of each loop (default: 60)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        start_ranks: Any = spawn  # torch does not type it
        start_ranks(on_rank, (directory, options.rounds), nprocs=2)
