"""The conformance battery: every arrangement, in every way of using it, gives the oracle's gradient and one reduction.

``arrangements.py`` x {forward and backward inside the block, backward only} x {mean, weighted} x windows {of 1,
of 3, of 3 and a short one closed by flush}. All uses of one arrangement travel to the ranks in one run, because
a run costs more than a use; each use is a test of its own all the same. ``test_arrangements.py`` is the
control: the same table without the library.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.arrangements import ARRANGEMENTS, BY_NAME, Arrangement
from distributed.battery import (
    LR,
    Watch,
    clear,
    expected,
    expected_local,
    learning,
    microbatch,
    next_gradient,
    parts,
    split,
)
from support.oracle import mean_square, same
from support.ranks import Pool

Seen = dict[str, Any]
AFTER_CLOSE = 50
"""The number of the data of the ordinary step after ``close()``."""


class Use(NamedTuple):
    """One way to use the library."""

    forward_inside: bool
    weighted: bool
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        where = "inside" if self.forward_inside else "backward_only"
        return f"{where}-{'weighted' if self.weighted else 'mean'}-{'+'.join(map(str, self.sizes))}"


USES = [Use(*use) for use in product((True, False), (False, True), ((1, 1, 1), (3, 3, 3), (3, 3, 2)))]


@dataclass
class Loop:
    """A user's loop with the library around the model of one row, noting what was sent when."""

    row: Arrangement
    use: Use
    model: Any
    counts: list[list[int]] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    def train(self) -> dict[str, Tensor]:
        from accumulate import Accumulator

        optimizer = torch.optim.SGD(learning(self.row, self.model), lr=LR)
        acc = Accumulator(self.model, max(self.use.sizes))
        for window, size in enumerate(self.use.sizes):
            self.counts.append([])
            self.small.append(0)
            for index in range(size):
                self.one(acc, window, index)
                assert acc.is_boundary == (index == max(self.use.sizes) - 1)
            if not acc.is_boundary:
                self.flush(acc)
            self.gradients.append(self.row.gradients(self.model))
            optimizer.step()
            clear(self.model)
        acc.close()
        return self.row.parameters(self.model)

    def one(self, acc: Any, window: int, index: int) -> None:
        """One micro-batch, with forward inside the block or before it."""
        x, y, weight = microbatch(self.row, dist.get_rank(), window, index, self.use.weighted)
        whole = Watch(self.row)
        early = None if self.use.forward_inside else self.loss(x, y, whole)
        with contextlib.nullcontext() if self.row.compiled else whole, acc.step():
            loss = self.loss(x, y, None) if early is None else early
            with whole if self.row.compiled else contextlib.nullcontext():
                acc.backward(loss, weight=weight if self.use.weighted else None)
        self.note(whole)

    def loss(self, x: Tensor, y: Tensor, seen: Watch | None) -> Tensor:
        with contextlib.nullcontext() if self.row.compiled or seen is None else seen:
            return mean_square(self.row.forward(self.model, x), y.to(self.row.dtype))

    def flush(self, acc: Any) -> None:
        with Watch(self.row) as seen:
            assert acc.flush()
        assert acc.is_boundary
        self.note(seen)

    def note(self, seen: Watch) -> None:
        self.counts[-1].append(seen.reductions)
        self.small[-1] += seen.small

    def ordinary(self) -> tuple[int, dict[str, Tensor]]:
        """A step without the library."""
        x, y, _ = microbatch(self.row, dist.get_rank(), AFTER_CLOSE, 0, False)
        loss = self.loss(x, y, None)
        with Watch(self.row) as seen:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward
        return seen.reductions, self.row.gradients(self.model)


def hooks(model: Any) -> list[int]:
    """How many hooks each module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [sum(len(getattr(module, kind)) for kind in kinds) for part in parts(model) for module in part.modules()]


def use_once(row: Arrangement, use: Use) -> Seen:
    loop = Loop(row, use, row.build())
    before = hooks(loop.model)
    with warnings.catch_warnings():
        if row.warns:
            warnings.filterwarnings("ignore", message=f".*{row.warns}")
        parameters = loop.train()
    after = hooks(loop.model)
    ordinary, next_one = loop.ordinary()
    return {
        "gradients": loop.gradients,
        "counts": loop.counts,
        "small": loop.small,
        "parameters": parameters,
        "hooks": (before, after),
        "ordinary": (ordinary, next_one),
    }


def use_all(name: str) -> list[Seen]:
    """Every use of one arrangement, on this rank; a use that fails says so and the others go on."""
    seen: list[Seen] = []
    for use in USES:
        try:
            seen.append(use_once(BY_NAME[name], use))
        except Exception:  # noqa: BLE001 - whatever it was, the test of this use shows it
            seen.append({"error": traceback.format_exc()})
        if BY_NAME[name].compiled:
            torch._dynamo.reset()
    return seen


@pytest.fixture(scope="module")
def seen(ranks: Callable[[int], Pool]) -> Callable[[str, Use], list[Seen]]:
    """``seen(name, use)``: what each rank saw; an arrangement runs when it is first asked for."""
    runs: dict[str, list[list[Seen]] | BaseException] = {}

    def look_up(name: str, use: Use) -> list[Seen]:
        if name not in runs:
            try:
                runs[name] = ranks(BY_NAME[name].world).run(use_all, name, timeout=240)
            except Exception as error:  # noqa: BLE001 - raised below, once for each test
                runs[name] = error
        run = runs[name]
        if isinstance(run, BaseException):
            raise run
        found = [rank[USES.index(use)] for rank in run]
        errors = "\n".join(f"--- rank {rank} ---\n{one['error']}" for rank, one in enumerate(found) if "error" in one)
        assert not errors, errors
        return found

    return look_up


@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("name", [row.name for row in ARRANGEMENTS])
def test_conforms(name: str, use: Use, seen: Callable[[str, Use], list[Seen]]) -> None:
    row = BY_NAME[name]
    found = seen(name, use)
    assert len(found) == row.world
    for rank, one in enumerate(found):
        check_gradients(row, use, rank, one)
        check_counts(row, use, one)
        check_after_close(row, rank, one)
        leader = found[row.peers(rank)[0]]
        for mine, theirs in zip(one["gradients"], leader["gradients"], strict=True):
            ours, reference = split(row, mine)[0], split(row, theirs)[0]
            assert ours or row.wrapper == "none"
            assert all(torch.equal(ours[key], reference[key]) for key in reference), "ranks differ"


def check_gradients(row: Arrangement, use: Use, rank: int, one: Seen) -> None:
    references, after = expected(row, rank, use.sizes, use.weighted)
    assert len(one["gradients"]) == len(references) == 3
    for actual, reference in zip(one["gradients"], references, strict=True):
        same(split(row, actual)[0], split(row, reference)[0], row.tolerance)
    local = split(row, one["gradients"][0])[1]
    if row.local and not use.weighted:  # with weights, what a rank alone should have is nobody's promise
        same(local, expected_local(row, rank, 0, use.sizes[0]), row.tolerance)
    same(one["parameters"], after, row.tolerance)


def check_counts(row: Arrangement, use: Use, one: Seen) -> None:
    for window, (counts, size) in enumerate(zip(one["counts"], use.sizes, strict=True)):
        flushed = size < max(use.sizes)
        assert len(counts) == size + flushed
        off = [0] * (len(counts) - 1)
        if row.first_microbatch_reduced and window == 0 and off:
            off[0] = row.reductions_of(0)
        assert counts == [*off, row.reductions_of(window)], f"reductions in window {window}"
        talks = row.wrapper != "none" and (use.weighted or flushed)
        most = (2 if row.world == 4 and not row.group else 1) * talks * (1 + flushed)
        assert (talks and row.world > 1) <= one["small"][window] <= most, "sums of weights"


def check_after_close(row: Arrangement, rank: int, one: Seen) -> None:
    before, after = one["hooks"]
    assert before == after, "hooks stay behind"
    count, actual = one["ordinary"]
    assert count == row.reductions_of(3), "an ordinary step after close() does not reduce"
    reference = next_gradient(row, rank, one["parameters"], AFTER_CLOSE)
    if not row.local:
        same(actual, reference, row.tolerance)
