"""The benchmark's own ranks: spawned processes that answer requests until told to stop.

A rank that dies, raises or falls silent ends the whole run with one message, and leaving the ``with`` block
leaves no process behind. If the parent itself is killed, each rank reads the end of its pipe and exits.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

Setting = TypeVar("Setting")
Worker = Callable[[object], object]
Build = Callable[[Setting, int, Path], Worker]


class RankError(RuntimeError):
    """A rank died, raised, or did not answer in time. The message says which, and why."""


class Ranks(Generic[Setting]):
    """``size`` processes that answer requests with the worker that ``build(setting, rank, folder)`` returns.

    ``folder`` is shared by the ranks and removed at the end. ``timeout``: seconds to wait for an answer.
    """

    def __init__(self, size: int, build: Build[Setting], setting: Setting, *, timeout: float) -> None:
        self._size, self._build, self._setting, self._timeout = size, build, setting, timeout
        self._processes: list[multiprocessing.context.SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="accumulate-bench-", ignore_cleanup_errors=True)

    def __enter__(self) -> Ranks[Setting]:
        try:
            # A child inherits an ignored Ctrl-C. The parent alone answers it: one message, not N tracebacks.
            with _ignoring(signal.SIGINT):
                for rank in range(self._size):
                    self._start(rank)
            self._collect(range(self._size), "starting")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_serve,
            args=(self._build, self._setting, rank, Path(self._folder.name), theirs),
            name=f"accumulate-bench-{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()  # or the end of a dead rank's pipe would never be seen here
        self._processes.append(process)
        self._pipes.append(ours)

    def ask(self, request: object, doing: str, ranks: Sequence[int] | None = None) -> list[object]:
        """Send ``request`` to ``ranks`` (default: all), return their answers; ``doing`` is for the message.

        Raises:
            RankError: a rank did not answer.
        """
        ranks = range(self._size) if ranks is None else ranks
        try:
            for rank in ranks:
                self._pipes[rank].send(request)
        except OSError:
            raise self._explain(doing) from None
        return self._collect(ranks, doing)

    def _collect(self, ranks: Sequence[int], doing: str) -> list[object]:
        answers: dict[int, object] = {}
        sentinels = [process.sentinel for process in self._processes]
        deadline = time.monotonic() + self._timeout
        while len(answers) < len(ranks):
            pending = [self._pipes[rank] for rank in ranks if rank not in answers]
            ready = wait([*pending, *sentinels], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(str(rank) for rank in ranks if rank not in answers)
                raise RankError(f"no answer from rank {silent} within {self._timeout:g} s while {doing}")
            for pipe in (pipe for pipe in pending if pipe in ready):
                answers[self._pipes.index(pipe)] = self._receive(pipe, doing)
            if any(sentinel in ready for sentinel in sentinels):
                raise self._explain(doing)
        return [answers[rank] for rank in ranks]

    def _receive(self, pipe: Connection, doing: str) -> object:
        try:
            failed, answer = pipe.recv()
        except (EOFError, OSError):
            raise self._explain(doing) from None
        if failed:
            raise self._explain(doing, f"rank {self._pipes.index(pipe)} failed while {doing}:\n{answer}")
        return answer

    def _explain(self, doing: str, failure: str | None = None) -> RankError:
        """The cause, not its echo: a rank that died makes the others' collectives fail a moment later."""
        time.sleep(0.3)
        for rank, process in enumerate(self._processes):
            code = process.exitcode
            if code is not None and (code < 0 or failure is None):
                how = _how_it_ended(code)
                return RankError(f"rank {rank} (process {process.pid}) {how} while {doing}{self._log(rank)}")
        return RankError(failure or f"a rank closed its pipe while {doing}")

    def _log(self, rank: int) -> str:
        log = Path(self._folder.name, f"rank{rank}.log")
        lines = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
        return "".join(f"\n  {line}" for line in lines)

    def _stop(self) -> None:
        with _ignoring(signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not leave ranks behind
            for process in self._processes:
                process.kill()  # a rank has nothing to save
            for process in self._processes:
                process.join()
            self._folder.cleanup()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


@contextmanager
def _ignoring(*signals: signal.Signals) -> Iterator[None]:
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in signals]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _serve(build: Build[Setting], setting: Setting, rank: int, folder: Path, pipe: Connection) -> None:
    """The life of one rank. What it prints goes to a log, whose end the parent shows if the rank dies."""
    log = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        worker = build(setting, rank, folder)
        pipe.send((False, None))
        while True:
            pipe.send((False, worker(pipe.recv())))
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    except Exception:  # noqa: BLE001  # whatever it was, the parent has to hear of it
        with suppress(OSError):
            pipe.send((True, traceback.format_exc()))
            pipe.poll(None)  # stay, so that the cause stands alone: the parent kills this process, or is gone
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
