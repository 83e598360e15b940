"""Real ranks for tests: persistent gloo workers that run a function of a test file and hand back what each rank
returned.

What forced this design:

- Starting a process and importing torch takes seconds, a test takes milliseconds: workers are kept, and pools
  of several sizes share them (worker i is rank i of every pool).
- A run must not inherit from the run before it. Each run gets a *fresh default process group* over a file of
  its own, because a collective that one rank never answered would otherwise be answered by the next test.
  Seeds, the default dtype and dynamo's caches are put back as well. After a failure nothing can be trusted, so
  the workers of that run are killed and new ones start.
- A failing test must say which rank did what: a traceback per rank, or the stack of a rank that hangs
  (faulthandler writes it from a signal handler in C, so that a rank blocked in a collective answers too).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

__all__ = ["TORCH_WARNINGS", "Pool", "RankError", "Worker", "on_ranks", "stop"]

T = TypeVar("T")

START_SECONDS = 180.0
RUN_SECONDS = float(os.environ.get("RANKS_SECONDS", "120"))
"""How long a run may take where the test does not say; mutants.py, whose ranks hang on purpose, waits less."""
GRACE_SECONDS = 4.0
"""How long the other ranks may take to report too, once one rank has failed."""

TORCH_WARNINGS = {
    "The `NO_SHARD` sharding strategy is deprecated": "users have such models; tested for as long as torch offers it",
    "The .grad attribute of a Tensor that is not a leaf": "torch 2.13: dynamo asks each tensor it traces for .grad",
    "find_unused_parameters=True was specified in DDP": "tests use that flag also where every parameter is used",
    "`torch.jit.script_method` is deprecated": "torch 2.13: inductor's own modules use it when they are imported",
}
"""Warnings of torch's own that are no fault of ours: the beginning of the message -> the reason to ignore it."""


class RankError(Exception):
    """A run failed; ``ranks`` holds what each failed rank has to say: a traceback, an exit code, or a stack."""

    def __init__(self, ranks: dict[int, str]) -> None:
        self.ranks = ranks
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(ranks.items())))


@dataclass(frozen=True)
class _Job:
    file: str
    module: str
    qualname: str
    args: bytes
    """Pickled by themselves, for they may hold what only that file defines."""
    rank: int
    world: int
    rendezvous: str
    timeout: float


# -- in the worker ----------------------------------------------------------------------------------------------------


def _module(file: str, name: str) -> ModuleType:
    """The module of that source file: the one already imported from it, or a new one under the parent's name for it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file:
            return module
    parts = name.split(".")
    for end in range(1, len(parts)):  # pickle imports a name's parents, which need not be packages here
        parent = ".".join(parts[:end])
        sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _function(job: _Job) -> Callable[..., object]:
    found: object = _module(job.file, job.module)
    for part in job.qualname.split("."):
        found = getattr(found, part)
    return cast("Callable[..., object]", getattr(found, "each_rank", found))


def _strict_warnings() -> None:
    warnings.simplefilter("error")
    for message in TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


_RETIRED: list[dist.ProcessGroup] = []
"""The group of the last run. Its destructor joins gloo's threads while it holds the GIL, and deadlocks if one
of them is about to take the GIL to release the last collective (seen with torch 2.13). So it has to wait until
those threads are idle.
"""


def _work(job: _Job) -> object:
    """Run the job as its rank in a fresh default process group."""
    _RETIRED.clear()
    gc.collect()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.rendezvous}",
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout + 30),  # the parent's timeout comes first: it shows the stacks
    )
    try:
        function = _function(job)  # first, so that its module is known when the arguments are read
        result = function(*pickle.loads(job.args))
        dist.barrier()  # no rank leaves the group while another still needs its answer
        return result
    finally:
        if dist.group.WORLD is not None:
            _RETIRED.append(dist.group.WORLD)
        dist.destroy_process_group()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()


def _outcome(job: _Job) -> tuple[bool, bytes]:
    with warnings.catch_warnings():
        _strict_warnings()
        try:
            return True, pickle.dumps(_work(job))
        except BaseException:  # noqa: BLE001 - a rank reports whatever happened, SystemExit too
            return False, traceback.format_exc().encode()


def _serve(pipe: connection.Connection, stacks: str) -> None:
    """What a worker does: answer jobs until the parent is gone."""
    file = open(stacks, "w")  # noqa: SIM115 - faulthandler writes to it for as long as the process lives
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_outcome(job)))


# -- in the parent ----------------------------------------------------------------------------------------------------


class Worker:
    """One process that stays, and is rank ``rank`` whenever it runs something."""

    def __init__(self, rank: int) -> None:
        context = get_context("spawn")
        handle, name = tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".stacks")
        os.close(handle)
        self.stacks = Path(name)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        if not self.pipe.poll(START_SECONDS):
            raise TimeoutError(f"a worker did not start within {START_SECONDS:g} s")
        try:
            self.pipe.recv_bytes()
        except EOFError:
            raise RuntimeError(f"a worker ended with exit code {self.exit_code()} while it started") from None

    def exit_code(self) -> int | None:
        self.process.join(timeout=10)
        return self.process.exitcode

    def stack(self) -> str:
        """What every thread of this rank is doing right now."""
        before = self.stacks.stat().st_size
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while self.stacks.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        return self.stacks.read_text()[before:]

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.stacks.unlink(missing_ok=True)


def stop(team: list[Worker]) -> None:
    """End these workers and forget them."""
    while team:
        team.pop().kill()


def on_ranks(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that asserts on each of ``world`` ranks; its parameters can be parametrized as usual.

    Inside, ``dist.get_rank()`` tells the ranks apart.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        def test(ranks: Callable[[int], Pool], **arguments: object) -> None:
            ranks(world).run(fn, *(arguments[name] for name in names))

        parameters = list(inspect.signature(fn).parameters.values())
        names = [parameter.name for parameter in parameters]
        shared = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, attribute, getattr(fn, attribute))
        test.__dict__.update(fn.__dict__, __signature__=inspect.Signature([shared, *parameters]), each_rank=fn)
        return test

    return decorate


class Pool:
    """``world`` ranks that run a module-level function of any source file; started at the first run."""

    def __init__(self, world: int, team: list[Worker] | None = None) -> None:
        if world < 1:
            raise ValueError(f"world must be at least 1, got {world}")
        self.world = world
        self.team = [] if team is None else team

    def run(self, fn: Callable[..., T], *args: object, timeout: float = RUN_SECONDS) -> list[T]:
        """``fn(*args)`` on every rank at once: each rank's result, or :class:`RankError`.

        ``fn`` is found in the worker by its source file and qualified name; arguments and results are pickled.
        A rank that has not returned after ``timeout`` seconds hangs.
        """
        self._start()
        file, qualname = inspect.getsourcefile(fn), fn.__qualname__
        if file is None or "<" in qualname:
            raise ValueError(f"{qualname} cannot be found by name in its source file; give a module-level function")
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            given, rendezvous = pickle.dumps(args), f"{folder}/rendezvous"
            jobs = [
                pickle.dumps(_Job(file, fn.__module__, qualname, given, rank, self.world, rendezvous, timeout))
                for rank in range(self.world)
            ]
            try:
                for worker, job in zip(self.team, jobs, strict=False):  # a shared team may be larger than this pool
                    worker.pipe.send_bytes(job)
                results, failures = self._collect(timeout)
            except BaseException:  # Ctrl-C, or pytest's own timeout: the workers are in the middle of something
                self.close()
                raise
        if failures:
            self.close()
            raise RankError(failures)
        return [cast("T", pickle.loads(results[rank])) for rank in range(self.world)]

    def close(self) -> None:
        """End the workers, those of pools that share them too; the next run starts new ones."""
        stop(self.team)

    def _start(self) -> None:
        fresh = [Worker(rank) for rank in range(len(self.team), self.world)]
        try:
            for worker in fresh:
                worker.wait_until_ready()
        except BaseException:
            stop(fresh)
            raise
        self.team.extend(fresh)

    def _collect(self, timeout: float) -> tuple[dict[int, bytes], dict[int, str]]:
        results: dict[int, bytes] = {}
        failures: dict[int, str] = {}
        pending = {self.team[rank].pipe: rank for rank in range(self.world)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._stuck(sorted(pending.values()), timeout, failures))
                break
            for pipe in cast("Sequence[connection.Connection]", ready):
                rank = pending.pop(pipe)
                ok, payload = self._receive(rank)
                if ok:
                    results[rank] = payload
                else:
                    failures[rank] = payload.decode()
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failures

    def _receive(self, rank: int) -> tuple[bool, bytes]:
        worker = self.team[rank]
        try:
            ok, payload = pickle.loads(worker.pipe.recv_bytes())
            return ok, payload
        except (EOFError, ConnectionError):
            text = f"crashed with exit code {worker.exit_code()}\n{worker.stacks.read_text()}"
            return False, text.encode()

    def _stuck(self, ranks: Sequence[int], timeout: float, failures: dict[int, str]) -> dict[int, str]:
        why = (
            f"rank {min(failures)} failed and this rank did not return"
            if failures
            else f"no result after {timeout:g} s"
        )
        return {rank: f"hangs: {why}; its stack:\n{self.team[rank].stack()}" for rank in ranks}
