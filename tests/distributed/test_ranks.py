"""The harness first: if a rank raises, crashes or hangs, the test says so, says where, and the next run works."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from support.ranks import Pool, RankError


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers of this file's own: they are killed so often that others should not have to start again."""
    pool = Pool(2)
    yield pool
    pool.close()


def add_up(amount: float) -> tuple[int, int, float]:
    total = torch.tensor(amount * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), float(total)


@dataclass(frozen=True)
class Parcel:
    """Known to this file only."""

    content: int


def unpack(parcel: Parcel, how: Callable[[Parcel], int]) -> Parcel:
    return Parcel(how(parcel) + dist.get_rank())


def content_of(parcel: Parcel) -> int:
    return parcel.content


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LookupError("the shelf is empty")
    dist.barrier()


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def wait_for_the_other_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.barrier()
    else:
        sleep_here()


def sleep_here() -> None:
    time.sleep(60)


def warn() -> None:
    warnings.warn("look here", UserWarning, stacklevel=1)


def leave_traces() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(99)
    if dist.get_rank() == 0:  # a message that nobody receives: only a group of its own keeps it from the next run
        dist.isend(torch.ones(1), dst=1)


def look_for_traces() -> tuple[torch.dtype, float]:
    received = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.full((1,), 7.0), dst=1)
    else:
        dist.recv(received, src=0)
    return torch.get_default_dtype(), float(received)


def modules() -> list[str]:
    return [name for name in sys.modules if name.startswith("torch.distributed.fsdp")]


def unpicklable() -> object:
    return lambda: None


def assert_works(pool: Pool) -> list[int]:
    results = pool.run(add_up, 1.5)
    assert [(rank, total) for rank, _, total in results] == [(rank, 4.5) for rank in range(pool.world)]
    return [pid for _, pid, _ in results]


def test_each_rank_returns_its_result_and_the_workers_stay(pool: Pool) -> None:
    first = assert_works(pool)
    assert len(set(first)) == 2
    assert os.getpid() not in first
    assert first == assert_works(pool)


def test_what_only_the_tests_file_defines_can_be_sent_and_returned() -> None:
    fresh = Pool(2)  # whose workers have not seen this file
    try:
        assert fresh.run(unpack, Parcel(4), content_of) == [Parcel(4), Parcel(5)]
    finally:
        fresh.close()


def test_a_raising_rank_shows_its_traceback_and_the_next_run_works(pool: Pool) -> None:
    before = assert_works(pool)
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, 1)
    assert "LookupError: the shelf is empty" in caught.value.ranks[1]
    assert "in raise_on" in caught.value.ranks[1]
    assert "--- rank 1 ---" in str(caught.value)
    assert set(before).isdisjoint(assert_works(pool))


def test_a_crashing_rank_shows_its_signal_and_the_next_run_works(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(crash_on, 0)
    assert f"crashed with exit code {-signal.SIGKILL}" in caught.value.ranks[0]
    assert_works(pool)


def test_a_rank_that_exits_shows_its_exit_code_and_the_next_run_works(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(exit_on, 1)
    assert "crashed with exit code 3" in caught.value.ranks[1]
    assert_works(pool)


def test_a_hanging_rank_shows_the_stack_of_each_rank_and_the_next_run_works(pool: Pool) -> None:
    assert_works(pool)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(wait_for_the_other_on, 0, timeout=2.0)
    assert time.monotonic() - started < 30
    assert "no result after 2 s" in caught.value.ranks[0]
    assert "in barrier" in caught.value.ranks[0]
    assert "in sleep_here" in caught.value.ranks[1]
    assert_works(pool)


def test_an_interrupted_run_leaves_nothing_to_the_next_one(pool: Pool) -> None:
    before = assert_works(pool)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleep_here)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert set(before).isdisjoint(assert_works(pool))


def test_a_warning_in_a_rank_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankError, match="UserWarning: look here"):
        pool.run(warn)


def test_a_result_that_cannot_be_sent_is_an_error_and_not_a_hang(pool: Pool) -> None:
    with pytest.raises(RankError, match="pickle"):
        pool.run(unpicklable)


def test_nothing_of_a_run_reaches_the_next_one(pool: Pool) -> None:
    workers = assert_works(pool)
    pool.run(leave_traces)
    (dtype, _), (_, received) = pool.run(look_for_traces)
    assert dtype is torch.float32
    assert received == 7.0
    assert workers == assert_works(pool)


def test_a_worker_does_not_import_fsdp_by_itself(pool: Pool) -> None:
    assert pool.run(modules) == [[], []]


def test_a_function_without_a_name_in_its_file_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="lambda"):
        pool.run(lambda: None)


def test_pools_of_different_sizes_share_workers(pool: Pool) -> None:
    two = assert_works(pool)
    (_, pid, total), *others = Pool(1, pool.team).run(add_up, 2.0)
    assert (pid, total, others) == (two[0], 2.0, [])
