"""Windows whose length the caller decides: by a function, by a budget, or two to an update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from accumulate import Accumulator
from support.loops import data, feed, grads, matches, plain_net
from support.oracle import Term, gradient, same, train

LR, RHO = 0.1, 0.05


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_case_26_a_ramp_by_tokens_seen() -> None:
    model, seen, sizes = plain_net(), 0, []
    acc = Accumulator(model, lambda update: 1 if seen < 20 else 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    windows: list[list[Term]] = [[]]
    for index in range(10):
        term = data(0, index, 1 + 4 * (index % 3), 1.0 + 4 * (index % 3))
        feed(acc, model, [term], weighted=True)
        seen += len(term.x)
        windows[-1].append(term)
        if acc.optimizer_step(optimizer, schedulers=[scheduler]):
            sizes.append(len(windows[-1]))
            windows.append([])
    assert sizes == [1, 1, 1, 1, 1, 3]  # 1 + 5 + 9 + 1 tokens are fewer than 20
    assert scheduler.last_epoch == acc.updates == 6
    same(parameters(model), train(plain_net(), windows[:-1], LR)[1], 1e-9)


def test_case_17_windows_that_end_when_they_hold_enough_tokens() -> None:
    model = plain_net()
    acc, held, window, totals = Accumulator(model), 0, list[Term](), []
    for index, n in enumerate([3, 8, 2, 2, 9, 1, 1]):
        term = data(0, index, n, float(n))
        held += n
        window.append(term)
        feed(acc, model, [term], weighted=True, boundary=held >= 10)
        if acc.is_boundary:
            matches(model, plain_net(), window)
            totals.append(held)
            held, window = 0, []
            model.zero_grad()
    assert acc.flush()
    matches(model, plain_net(), window)
    assert totals == [11, 13]


def sharpness_aware(model: nn.Module, window: list[Term]) -> dict[str, Tensor]:
    """The oracle's parameters after one update of it: the gradient at the worst point nearby."""
    here = gradient(model, window)
    norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in here.values()]))
    there = plain_net()
    there.load_state_dict({name: p + RHO * here[name] / norm for name, p in parameters(model).items()})
    final = gradient(there, window)
    return {name: p - LR * final[name] for name, p in parameters(model).items()}


@pytest.mark.parametrize("scaled", [False, True])
def test_case_55_sharpness_aware_steps_take_two_windows_each(scaled: bool) -> None:
    model, reference = plain_net(), plain_net()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1, enabled=scaled)
    acc, optimizer = Accumulator(model, scaler=scaler), torch.optim.SGD(model.parameters(), lr=LR)
    for update, size in enumerate((3, 3, 2)):
        window = [data(0, 10 * update + index) for index in range(size)]
        for index, term in enumerate(window, start=1):
            feed(acc, model, [term], boundary=index == size)
        scaler.unscale_(optimizer)
        norm = acc.clip_grad_norm_(float("inf"))
        uphill = {name: value * (RHO / norm) for name, value in grads(model).items()}
        optimizer.zero_grad()
        if scaled:
            scaler.update()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(uphill[name])
        for index, term in enumerate(window, start=1):
            feed(acc, model, [term], boundary=index == size)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(uphill[name])
        assert acc.optimizer_step(optimizer)
        reference.load_state_dict(sharpness_aware(reference, window))
        same(parameters(model), parameters(reference), 1e-9)
    assert acc.updates == 6
    assert scaler.get_scale() == (1024.0 * 2**6 if scaled else 1.0)
