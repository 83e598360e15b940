"""Saved between two micro-batches and loaded elsewhere: bit for bit what an uninterrupted run gives, on real ranks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accumulate import Accumulator
from distributed.arrangements import ARRANGEMENTS, BY_NAME, Arrangement
from distributed.battery import LR, clear, learning, microbatch, parts
from support.loops import rank
from support.oracle import mean_square
from support.ranks import Pool

STEPS, UPDATES = 3, 3
MID_WINDOW = ("none", "DDP", "several")
"""The wrappers whose rows can be resumed in mid-window."""


def local(tensor: Tensor) -> Tensor:
    """This rank's piece."""
    piece = getattr(tensor, "_local_tensor", tensor).detach()
    assert isinstance(piece, Tensor)
    return piece


def pieces(model: Any) -> list[Tensor]:
    """Every weight and buffer that this rank holds."""
    return [local(t) for part in parts(model) for t in (*part.parameters(), *part.buffers())]


class Run:
    """One process's objects: model, optimizer, accumulator."""

    def __init__(self, row: Arrangement, weighted: bool) -> None:
        self.row, self.weighted = row, weighted
        self.model = row.build()
        self.optimizer = torch.optim.SGD(learning(row, self.model), lr=LR, momentum=0.9)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{row.warns}" if row.warns else "-")
            self.acc = Accumulator(self.model, STEPS)

    def go_on(self, first: int, last: int) -> None:
        for index in range(first, last):
            x, y, weight = microbatch(self.row, rank(), *divmod(index, STEPS), self.weighted)
            with self.acc.step():
                loss = mean_square(self.row.forward(self.model, x), y.to(self.row.dtype))
                self.acc.backward(loss, weight=weight if self.weighted else None)
            if self.acc.is_boundary:
                self.optimizer.step()
                clear(self.model)

    def save(self) -> bytes:
        """Everything, as a checkpoint file has it."""
        file = io.BytesIO()
        weights = [t.clone() for t in pieces(self.model)]
        momenta = [local(s["momentum_buffer"]).clone() for s in self.optimizer.state.values()]
        torch.save({"weights": weights, "momenta": momenta, "acc": self.acc.state_dict()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        found = torch.load(io.BytesIO(saved), weights_only=True)
        with torch.no_grad():
            for mine, theirs in zip(pieces(self.model), found["weights"], strict=True):
                mine.copy_(theirs)
            for param, momentum in zip(self.optimizer.param_groups[0]["params"], found["momenta"], strict=False):
                buffer = param.detach().clone()
                local(buffer).copy_(momentum)
                self.optimizer.state[param]["momentum_buffer"] = buffer
        self.acc.load_state_dict(found["acc"])

    def result(self) -> dict[str, Any]:
        grads = [p.grad for part in parts(self.model) for p in part.parameters()]
        acc = self.acc
        return {
            "weights": pieces(self.model),
            "grads": [None if g is None else local(g) for g in grads],
            "loss": acc.loss,
            "global loss": acc.global_loss(),
            "counters": (acc.micro_steps, acc.updates, acc.position, acc.is_boundary),
        }


def identical(there: Any, here: Any) -> bool:
    if isinstance(there, (list, tuple)):
        return len(there) == len(here) and all(map(identical, there, here))
    if isinstance(there, dict):
        return there.keys() == here.keys() and all(identical(there[key], here[key]) for key in there)
    if isinstance(there, Tensor):
        return torch.equal(there, here) and there.dtype == here.dtype
    return bool(there == here)


def resumed_from(row: Arrangement, weighted: bool, cuts: list[int]) -> dict[int, list[str]]:
    """For each cut, what differs at the end from an uninterrupted run."""
    whole, saved, total = Run(row, weighted), {}, STEPS * UPDATES + 1
    for index in range(total):
        whole.go_on(index, index + 1)
        if index + 1 in cuts:
            saved[index + 1] = whole.save()
    expected, found = whole.result(), {}
    for cut in cuts:
        run = Run(row, weighted)
        run.load(saved[cut])
        assert identical(run.result()["counters"], (cut, cut // STEPS, cut % STEPS, cut % STEPS == 0))
        run.go_on(cut, total)
        mine = run.result()
        found[cut] = [key for key in expected if not identical(expected[key], mine[key])]
    return found


def both(name: str, cuts: list[int]) -> dict[bool, dict[int, list[str]]]:
    return {weighted: resumed_from(BY_NAME[name], weighted, cuts) for weighted in (False, True)}


@pytest.mark.parametrize("row", [r for r in ARRANGEMENTS if r.wrapper in MID_WINDOW], ids=lambda row: row.name)
def test_case_49_resumed_in_mid_window_it_is_bit_equal(row: Arrangement, ranks: Callable[[int], Pool]) -> None:
    cuts = [1, 2, 5]
    for found in ranks(row.world).run(both, row.name, cuts):
        assert found == {weighted: {cut: [] for cut in cuts} for weighted in (False, True)}
