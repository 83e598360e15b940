"""What one rank of the benchmark does: build the models, then time or count windows as it is asked."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from accumulate.bench import data, loops
from accumulate.bench.cores import pin
from accumulate.bench.counting import CollectiveCounter, Traffic
from accumulate.bench.model import GPT
from accumulate.bench.plan import ACCUMULATE, HAND, REDUCING, Mode, Options


@dataclass(frozen=True)
class Job:
    """``mode`` at ``steps`` micro-batches a window, ``windows`` times; timed, or else counted."""

    mode: Mode
    steps: int
    windows: int = 1
    count: bool = False


@dataclass(frozen=True)
class Facts:
    """What only a rank knows: the model's size, the data, the device, and the wrapped model's loss by now."""

    parameters: int
    data: str
    device: str
    loss: float


def build(options: Options, rank: int, folder: Path) -> Callable[[object], object]:
    """Join the process group; the worker answers a ``Job`` by seconds or ``Traffic``, else by ``Facts``."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        pin(rank)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # all ranks are on this machine, and gloo's own guess fails where the host name does not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group(
        options.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        device_id=device if options.device == "cuda" else None,
    )
    return Rank(options, rank, device)


class Rank:
    """Two models with the same start: one plain, one wrapped, which all the reducing modes share."""

    def __init__(self, options: Options, rank: int, device: torch.device) -> None:
        self.options, self.device = options, device
        self.data = data.load(options.data, options.tokens)
        self.shuffle = torch.Generator().manual_seed(rank)  # each rank sees its own micro-batches
        self.plain = self._model()
        self.wrapped = _wrap(self._model(), options)
        models = (self.plain, self.wrapped)
        self.optimizers = {model: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True) for model in models}

    def __call__(self, request: object) -> object:
        """The answer to a ``Job``, or else ``Facts``."""
        if isinstance(request, Job):
            return self.count(request) if request.count else self.time(request)
        with torch.no_grad():
            loss = float(self.wrapped(self.data.sequences[:16].to(self.device)))
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return Facts(sum(p.numel() for p in self.plain.parameters()), self.data.name, device, loss)

    def time(self, job: Job) -> float:
        """Seconds that the windows took, from a moment when all ranks that take part were ready."""
        model = self._pick(job.mode)
        work = [self._window(job.steps, self.options.batch, self.options.tokens) for _ in range(job.windows)]
        with self._loop(job, model) as window:
            if not job.mode.alone:
                dist.barrier()
            self._synchronize()
            start = time.perf_counter()
            for microbatches in work:
                window(microbatches)
                self.optimizers[model].step()
                self.optimizers[model].zero_grad()
            self._synchronize()
            return time.perf_counter() - start

    def count(self, job: Job) -> Traffic:
        """One untimed window under a counter. What is reduced does not depend on the data: two tokens do."""
        model = self._pick(job.mode)
        with self._loop(job, model) as window, CollectiveCounter() as counter:
            window(self._window(job.steps, 1, min(2, self.options.tokens)))
        self.optimizers[model].zero_grad()
        traffic: Traffic = counter.traffic
        return traffic

    def _pick(self, mode: Mode) -> nn.Module:
        return self.wrapped if mode in REDUCING else self.plain

    def _loop(self, job: Job, model: nn.Module) -> AbstractContextManager[loops.Window]:
        if job.mode == ACCUMULATE:
            return loops.accumulate(model, job.steps, self.options.policy)
        if job.mode == HAND and isinstance(model, DistributedDataParallel):
            return loops.hand_ddp(model, job.steps)
        if job.mode == HAND:
            return loops.hand_fsdp2(cast(FSDPModule, model), job.steps)
        return loops.every(model, job.steps)

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        o = self.options
        sizes = {"tokens": o.tokens, "layers": o.layers, "width": o.width, "heads": o.heads}
        return GPT(vocabulary=self.data.vocabulary, **sizes).to(self.device)

    def _window(self, steps: int, batch: int, tokens: int) -> list[Tensor]:
        rows = torch.randint(len(self.data.sequences), (steps, batch), generator=self.shuffle)
        return list(self.data.sequences[rows, :tokens].to(self.device))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _wrap(model: nn.Module, options: Options) -> nn.Module:
    if options.wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(options.device, (options.ranks,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
