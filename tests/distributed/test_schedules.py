"""Windows whose length the caller decides, on ranks."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from accumulate import Accumulator
from distributed.arrangements import BY_NAME, ddp
from support.loops import data, everyone, feed, loss_of, matches, plain_net, rank
from support.oracle import Term, gradient, same
from support.ranks import on_ranks

LR, RHO = 0.1, 0.05


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_case_55_sharpness_aware_steps_take_two_windows_each(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc, optimizer = Accumulator(model), torch.optim.SGD(model.parameters(), lr=LR)
    expected = {key: p.detach() for key, p in row.seed().named_parameters()}
    for update in range(2):
        indices = range(3 * update, 3 * update + 3)
        for again in (False, True):
            for index in indices:
                feed(acc, model, [data(rank(), index)], boundary=index == indices[-1])
            if not again:
                norm = acc.clip_grad_norm_(float("inf"))
                uphill = [cast("torch.Tensor", p.grad) * (RHO / norm) for p in model.parameters()]
                optimizer.zero_grad()
            with torch.no_grad():
                for p, step in zip(model.parameters(), uphill, strict=True):
                    p.add_(step, alpha=-1 if again else 1)
        assert acc.optimizer_step(optimizer)
        there = row.seed()
        there.load_state_dict(expected)
        here = gradient(there, everyone(indices))
        length = torch.linalg.vector_norm(torch.cat([value.flatten() for value in here.values()]))
        there.load_state_dict({key: value + RHO * here[key] / length for key, value in expected.items()})
        final = gradient(there, everyone(indices))
        expected = {key: value - LR * final[key] for key, value in expected.items()}
        same(row.parameters(model), expected, 1e-9)
    assert acc.updates == 4


@on_ranks(2)
def test_case_17_windows_that_end_when_all_ranks_together_hold_enough_tokens() -> None:
    model, lengths = ddp(plain_net()), [(3, 4), (8, 1), (2, 2), (6, 5), (1, 9)]
    acc, held, window, totals = Accumulator(model), 0, list[Term](), []
    for index, sizes in enumerate(lengths):  # both ranks know both lengths
        held += sum(sizes)
        window += [data(r, index, sizes[r], float(sizes[r])) for r in range(2)]
        feed(acc, model, [data(rank(), index, sizes[rank()], float(sizes[rank()]))], True, boundary=held >= 12)
        if acc.is_boundary:
            matches(model, plain_net(), window)
            totals.append(held)
            held, window = 0, []
            model.zero_grad()
    assert totals == [16, 15]
    assert acc.flush()
    matches(model, plain_net(), window)


@on_ranks(2)
def test_case_52_windows_of_unequal_length_in_one_loop() -> None:
    gen, disc = ddp(plain_net(1)), ddp(plain_net(2))
    gen_acc, disc_acc = Accumulator(gen, 2), Accumulator(disc, 4)
    seeds = plain_net(1), plain_net(2)
    for index in range(4):
        x, y, _ = data(rank(), index)
        fake = gen(x)
        with disc_acc.step():
            disc_acc.backward(loss_of(disc, Term(fake.detach(), y)))
        disc.requires_grad_(False)
        with gen_acc.step():
            gen_acc.backward((disc(fake) - y).square().mean())
        disc.requires_grad_(True)
        if gen_acc.is_boundary:
            pair = nn.Sequential(plain_net(1), plain_net(2).requires_grad_(False))
            reference = gradient(pair, everyone((index - 1, index)))
            found = {f"0.{name.removeprefix('module.')}": p.grad for name, p in gen.named_parameters()}
            same(cast("dict[str, torch.Tensor]", found), reference)
            gen.zero_grad()
    assert (gen_acc.updates, disc_acc.updates) == (2, 1)
    matches(disc, seeds[1], [Term(seeds[0](data(r, i).x).detach(), data(r, i).y) for r in range(2) for i in range(4)])
