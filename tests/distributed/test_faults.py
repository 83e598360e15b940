"""Faults on real ranks, one table of faults and wrappers: afterwards the next window is exact, or the next call says
what to do; flags are what they were, and the model trains as ever after ``close()``.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import sys
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accumulate import AccumulateError, Accumulator, WindowError
from distributed.arrangements import BY_NAME, Arrangement, ddp
from distributed.faults import BLOCK_FAULTS, EXCEPTIONS, Fragile, backward, flags, goes_off, hooks, run, steps_badly
from support.counting import Collectives
from support.loops import data, everyone, feed, grads, loss_of, matches, plain_net, rank
from support.oracle import Term, gradient, mean_square, same
from support.ranks import on_ranks

STEPS = 3
WRAPPERS = ["plain", "ddp", "fsdp1-full", "fsdp1-grad-op-orig", "fsdp2", "fsdp2-children"]
NAN, INF = float("nan"), float("inf")


class Scene:
    """A fragile model under a wrapper, and what must be true of it after a fault."""

    def __init__(self, name: str) -> None:
        self.row: Arrangement = replace(BY_NAME[name], seed_class=Fragile)
        self.model = self.row.build()
        self.before = (flags(self.model), hooks(self.model))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.acc = Accumulator(self.model, STEPS)
        self.feed([90, 91, 92])
        self.expect([90, 91, 92])

    def feed(self, indices: Iterable[int], weighted: bool = False) -> None:
        for index in indices:
            run(self.acc, self.row, self.model, data(rank(), index), weighted)

    def expect(self, indices: Iterable[int]) -> None:
        """The window is closed, and its gradient is that of these micro-batches of every rank."""
        assert self.acc.is_boundary
        same(self.row.gradients(self.model), gradient(self.row.seed(), everyone(indices)))
        self.model.zero_grad()

    def goes_on(self) -> None:
        """Either the window can be completed, and is exact, or an error says that reset() is needed."""
        assert flags(self.model) == self.before[0]
        try:
            self.feed(range(self.acc.position, STEPS))
        except WindowError as error:
            assert "reset()" in str(error)  # noqa: PT017 - either is right
            self.acc.reset()
        else:
            self.expect(range(STEPS))

    def recovers(self) -> None:
        """Whatever was, two more windows are exact, and so is the model without the library."""
        for first in (10, 20):
            self.feed(range(first, first + STEPS))
            self.expect(range(first, first + STEPS))
        self.ends()
        backward(mean_square(self.row.forward(self.model, data(rank(), 5).x), data(rank(), 5).y))
        same(self.row.gradients(self.model), gradient(self.row.seed(), everyone([5])))

    def ends(self) -> None:
        self.acc.close()
        assert (flags(self.model), hooks(self.model)) == self.before


# -- in a micro-batch -------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPERS[1:])
@pytest.mark.parametrize("place", BLOCK_FAULTS)
@pytest.mark.parametrize("error", EXCEPTIONS)
def test_a_fault_in_a_micro_batch_of_every_rank(name: str, place: str, error: str) -> None:
    in_a_micro_batch(name, place, error)


@on_ranks(1)
@pytest.mark.parametrize("place", BLOCK_FAULTS)
@pytest.mark.parametrize("error", EXCEPTIONS)
def test_a_fault_in_a_micro_batch_without_wrapper(place: str, error: str) -> None:
    in_a_micro_batch("plain", place, error)


def in_a_micro_batch(name: str, place: str, error: str) -> None:
    for index in range(STEPS):  # the first of a window, in its middle, at its boundary
        scene = Scene(name)
        scene.feed(range(index))
        with goes_off(place, EXCEPTIONS[error]):
            scene.feed([index])
        assert scene.acc.micro_steps == STEPS + index
        assert not scene.acc.is_boundary
        if name.startswith("fsdp1") and place in ("in forward", "in backward"):
            with pytest.raises(WindowError, match="broken"):
                scene.feed([index])
            with pytest.raises(AccumulateError, match="cannot recover from an exception"):
                scene.acc.reset()
            scene.ends()
            return  # torch has no way back for this model
        scene.goes_on()
        scene.recovers()


@on_ranks(2)
@pytest.mark.parametrize("place", BLOCK_FAULTS)
@pytest.mark.parametrize("error", EXCEPTIONS)
def test_a_fault_of_one_rank_off_the_boundary_under_ddp(place: str, error: str) -> None:
    for index in range(STEPS - 1):
        scene = Scene("ddp")
        scene.feed(range(index))
        with goes_off(place, EXCEPTIONS[error]) if rank() == 0 else nullcontext():
            scene.feed([index])
        assert flags(scene.model) == scene.before[0]
        scene.acc.reset()
        scene.recovers()


@on_ranks(2)
@pytest.mark.parametrize("then", ["a window", "close", "collected"])
def test_ctrl_c_in_a_forward_outside_any_block_does_not_switch_ddp_off(then: str) -> None:
    scene = Scene("ddp")
    with goes_off("in forward", KeyboardInterrupt):
        scene.model(data(rank(), 0).x)
    if then == "a window":
        scene.recovers()
        return
    if then == "close":
        scene.acc.close()
    else:
        del scene.acc
    assert (flags(scene.model), hooks(scene.model)) == scene.before


# -- numbers that are not finite --------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPERS[1:])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "weight", [None, 2.0, torch.tensor(2.0, dtype=torch.float64)], ids=["none", "number", "tensor"]
)
def test_a_loss_that_is_not_finite_on_one_rank_spoils_its_own_window_only(name: str, value: float, weight: Any) -> None:
    for index in range(STEPS):
        scene = Scene(name)
        for micro in range(STEPS):
            term = data(rank(), micro)
            with scene.acc.step():
                loss = mean_square(scene.row.forward(scene.model, term.x), term.y)
                scene.acc.backward(loss * (value if micro == index and rank() == 0 else 1), weight=weight)
        assert not scene.acc.clip_grad_norm_(1.0).isfinite()
        assert scene.acc.loss is not None
        assert bool(scene.acc.loss.isfinite()) == (rank() != 0)
        scene.optimizer.zero_grad()
        scene.feed(range(STEPS), weighted=weight is not None)
        assert scene.acc.loss.isfinite()
        scene.expect(range(STEPS))
        scene.recovers()


@on_ranks(2)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_weight_that_is_not_finite_spoils_its_own_window_only(value: float) -> None:
    scene = Scene("ddp")
    for _ in range(2):
        for micro in range(STEPS):
            with scene.acc.step():
                weight = torch.tensor(value if rank() == 0 else 1.0)
                scene.acc.backward(loss_of(scene.model, data(rank(), micro)), weight=weight)
        assert not scene.acc.clip_grad_norm_(1.0).isfinite()
        scene.model.zero_grad()
        scene.feed(range(STEPS), weighted=True)
        scene.expect(range(STEPS))
    scene.recovers()


# -- in the optimizer -------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPERS[1:])
@pytest.mark.parametrize("who", ["every rank", "rank 0"])
@pytest.mark.parametrize("then", ["step again", "clear"])
def test_an_optimizer_that_raises_can_be_stepped_again_or_left_out(name: str, who: str, then: str) -> None:
    in_the_optimizer(name, who, then)


@on_ranks(1)
@pytest.mark.parametrize("then", ["step again", "clear"])
def test_an_optimizer_that_raises_without_wrapper(then: str) -> None:
    in_the_optimizer("plain", "every rank", then)


def in_the_optimizer(name: str, who: str, then: str) -> None:
    scene = Scene(name)
    scene.acc.optimizer_step(scene.optimizer)
    scene.feed(range(STEPS))
    if who == "every rank" or rank() == 0:
        with pytest.raises(ZeroDivisionError):
            scene.acc.optimizer_step(steps_badly(scene.optimizer))
    assert scene.acc.is_boundary
    if then == "clear":
        scene.optimizer.zero_grad()
    else:
        assert scene.acc.optimizer_step(scene.optimizer)
    scene.recovers()


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize("who", ["the second optimizer", "the scheduler"])
def test_what_was_stepped_before_the_error_is_cleared_and_not_stepped_again(name: str, who: str) -> None:
    scene = Scene(name)
    params = list(scene.model.parameters())
    first, second = torch.optim.SGD(params[:2], lr=1e-9), torch.optim.SGD(params[2:], lr=1e-9)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    scene.feed(range(STEPS))
    before = [p.detach().clone() for p in params]
    with pytest.raises(ZeroDivisionError):
        if who == "the scheduler":
            scheduler.step = fails  # type: ignore[assignment, method-assign]  # the fault
            scene.acc.optimizer_step(first, second, schedulers=[scheduler])
        else:
            scene.acc.optimizer_step(first, steps_badly(second))
    once = [p.detach().clone() for p in params]
    assert [not torch.equal(a, b) for a, b in zip(before, once, strict=True)] == [
        i < 2 or who == "the scheduler" for i in range(len(params))
    ]
    assert scene.acc.optimizer_step(first, second) is (who != "the scheduler")
    assert all(torch.equal(a, p) for a, p in zip(once[:2], params[:2], strict=True))
    assert all(p.grad is None for p in params)


def fails(*args: object) -> None:
    raise ZeroDivisionError("a fault")


# -- in the loader ----------------------------------------------------------------------------------------------------


def broken_loader(count: int, place: str) -> Iterator[Term]:
    for index in range(count):
        yield data(rank(), index)
    if place == "raises":
        raise ZeroDivisionError("a fault")
    raise KeyboardInterrupt


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPERS[1:])
@pytest.mark.parametrize("place", ["raises", "is interrupted"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_an_exception_of_the_loader_leaves_no_window_that_the_next_loop_inherits(
    name: str, place: str, count: int
) -> None:
    in_the_loader(name, place, count)


@on_ranks(1)
@pytest.mark.parametrize("place", ["raises", "is interrupted"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_an_exception_of_the_loader_without_wrapper(place: str, count: int) -> None:
    in_the_loader("plain", place, count)


def in_the_loader(name: str, place: str, count: int) -> None:
    scene = Scene(name)
    handed = 0
    with pytest.raises(ZeroDivisionError if place == "raises" else KeyboardInterrupt):
        for term in scene.acc.batches(broken_loader(count, place)):
            run(scene.acc, scene.row, scene.model, term)
            handed += 1
            if scene.acc.is_boundary:
                scene.model.zero_grad()
    assert handed == count if place == "raises" else handed <= count  # Ctrl-C comes at once, not when its batch is due
    assert flags(scene.model) == scene.before[0]
    if scene.acc.position:
        for next_call in (lambda: scene.feed([0]), lambda: next(iter(scene.acc.batches([data(rank(), 0)])))):
            with pytest.raises(WindowError, match=r"flush\(\).*reset\(\)"):
                next_call()
        scene.acc.reset()
    for term in scene.acc.batches([data(rank(), index) for index in range(STEPS)]):
        run(scene.acc, scene.row, scene.model, term)
    scene.expect(range(STEPS))
    scene.recovers()


# -- processes of their own -------------------------------------------------------------------------------------------


def start(work: Callable[[int, str], object], folder: Path) -> list[BaseProcess]:
    """Two ranks apart from the pool's, which may have children or be killed."""
    # A spawned process finds the function by its module's name, below the folder that pytest puts on the path.
    work.__module__ = f"distributed.{Path(__file__).stem}"
    sys.modules.setdefault(work.__module__, sys.modules[__name__])
    context = get_context("spawn")
    processes: list[BaseProcess] = [context.Process(target=work, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


def joined(rank: int, folder: str) -> Path:
    """Join the process group; what this rank has to say goes into the file that is returned."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    return Path(folder, f"rank{rank}")


def dies_in_mid_window(rank: int, folder: str) -> None:
    said = joined(rank, folder)
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank, 0)])
    if rank == 1:
        os._exit(7)
    try:
        feed(acc, model, [data(rank, 1), data(rank, 2)])
    except RuntimeError as error:
        try:
            feed(acc, model, [data(rank, 3)])
        except WindowError as broken:
            said.write_text(f"{type(error).__name__}\n{broken}\n{acc.is_boundary}")
    os._exit(0)  # the group cannot be left in an orderly way any more


def test_a_rank_that_is_killed_in_mid_window_ends_the_others_with_an_error(tmp_path: Path) -> None:
    first, second = start(dies_in_mid_window, tmp_path)
    try:
        first.join(90)
        second.join(1)
        assert (first.exitcode, second.exitcode) == (0, 7)
    finally:
        first.kill()
    error, broken, boundary = (tmp_path / "rank0").read_text().splitlines()
    assert error in {"RuntimeError", "DistBackendError", "DistNetworkError"}
    assert "this window is broken" in broken
    assert boundary == "False"


class Squares(Dataset[Tensor]):
    """Samples that worker processes make."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


class Missing(Squares):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            raise FileNotFoundError("a fault")
        return super().__getitem__(index)


def loads_with_forked_workers(rank: int, folder: str) -> None:
    said = joined(rank, folder)
    model = ddp(plain_net())
    acc = Accumulator(model, 4)
    terms = [Term(x[None], x[None]) for x in (Squares()[index] for index in range(4))]
    feed(acc, model, terms[:1])
    for _ in range(2):  # a child that is forked with an open window has a copy of everything, and ends
        loader = DataLoader(Squares(), num_workers=1, multiprocessing_context="fork")
        assert len(list(loader)) == 6
    feed(acc, model, terms[1:])
    matches(model, plain_net(), terms)
    model.zero_grad()
    steps = acc.batches(DataLoader(Missing(), batch_size=1, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(FileNotFoundError):
        for x in steps:
            feed(acc, model, [Term(x, x)])
    model.zero_grad()
    feed(acc, model, terms)
    matches(model, plain_net(), terms)
    said.write_text("all is well")
    dist.destroy_process_group()


def test_forked_loader_workers_are_harmless_in_mid_window(tmp_path: Path) -> None:
    processes = start(loads_with_forked_workers, tmp_path)
    try:
        for process in processes:
            process.join(90)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["all is well"] * 2


# -- copies -----------------------------------------------------------------------------------------------------------


def pickled(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return cast("nn.Module", torch.load(file, weights_only=False))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopied": copy.deepcopy, "pickled": pickled}


@on_ranks(2)
@pytest.mark.parametrize("name", ["plain", "ddp", "ddp-find-unused", "ddp-under-plain"])
@pytest.mark.parametrize("way", sorted(COPIES))
def test_copies_and_pickles_of_a_model_know_nothing_of_the_accumulator(name: str, way: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    with pytest.warns(UserWarning, match="no wrapper") if name == "plain" else nullcontext():
        acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    inner = model if name == "plain" else model.body.module if name == "ddp-under-plain" else model.module
    twin = COPIES[way](inner)
    twin.zero_grad()
    with Collectives() as seen:
        backward(mean_square(twin(data(rank(), 5).x), data(rank(), 5).y))
    assert not seen.log
    same(grads(twin), gradient(row.seed(), [data(rank(), 5)]))
    assert acc.position == 1
    feed(acc, model, [data(rank(), 1)])
    if name != "plain":
        same(row.gradients(model), gradient(row.seed(), everyone(range(2))))


@on_ranks(2)
def test_a_copy_of_the_wrapper_itself_can_have_an_accumulator_of_its_own() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    twin = copy.deepcopy(model)
    twin.zero_grad()
    with Collectives() as seen:
        backward(loss_of(twin, data(rank(), 5)))
    assert len(seen.reductions) == 1
    matches(twin, plain_net(), everyone([5]))
    twin.zero_grad()
    other = Accumulator(twin, 2)
    for index in (1, 2):
        feed(other, twin, [data(rank(), index)])
    matches(twin, plain_net(), everyone((1, 2)))
    feed(acc, model, [data(rank(), 1)])
    matches(model, plain_net(), everyone(range(2)))


# -- what is left behind ----------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("verify", [False, True])
def test_an_accumulator_is_freed_by_reference_counting_alone(name: str, verify: bool) -> None:
    model = BY_NAME[name].build()
    before = (flags(model), hooks(model))
    gc.collect()
    gc.disable()
    try:
        for failed in (False, True):
            with pytest.warns(UserWarning, match="no wrapper") if name == "plain" else nullcontext():
                acc = Accumulator(model, 2, verify=verify)
            feed(acc, model, [data(rank(), index) for index in range(2 if failed else 3)])
            if failed:
                with suppress(ZeroDivisionError), acc.step():
                    raise ZeroDivisionError
            seen: list[weakref.ref[Any]] = [weakref.ref(acc), weakref.ref(acc._windows)]
            del acc
            assert [ref() for ref in seen] == [None, None]
            assert (flags(model), hooks(model)) == before
            model.zero_grad()
    finally:
        gc.enable()


@on_ranks(1)
@pytest.mark.parametrize("weighted", [False, True])
def test_ten_thousand_windows_leave_nothing_behind(weighted: bool) -> None:
    grows_by(plain_net(), 10_000, weighted)


@on_ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_thousand_windows_of_ddp_leave_nothing_behind(find_unused: bool) -> None:
    grows_by(ddp(nn.Linear(8, 8).double(), find_unused_parameters=find_unused), 1_000, weighted=True)


def grows_by(model: nn.Module, windows: int, weighted: bool) -> None:
    """Assert that the last 90 % of the windows add neither objects nor memory of Python's."""
    acc = Accumulator(model, 2)
    term = data(rank(), 0)
    kept: list[tuple[int, int]] = []
    for window in range(windows):
        feed(acc, model, [term, term], weighted)
        model.zero_grad()
        if window in (windows // 10, windows - 1):
            gc.collect()
            if not kept:
                tracemalloc.start()
            kept.append((len(gc.get_objects()), tracemalloc.get_traced_memory()[0]))
    tracemalloc.stop()
    assert acc.updates == windows
    assert kept[1][0] - kept[0][0] < 100
    assert kept[1][1] - kept[0][1] < 64 * 1024
