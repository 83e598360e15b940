"""Loops over unequal data: no rank hangs, and every window's gradient is that of all samples of all ranks."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accumulate import AccumulateError, Accumulator
from distributed.arrangements import BY_NAME, Arrangement, ddp
from support.counting import Collectives
from support.loops import data, equal_on_ranks, loss_of, matches, plain_net, rank
from support.oracle import Term, gradient, mean_square, same
from support.ranks import on_ranks

WRAPPED = ["ddp", "ddp-find-unused", "ddp-static-graph", "fsdp1-full", "fsdp2", "fsdp2-children"]
UNEVEN = [(5, 6), (3, 7), (1, 4), (4, 4), (7, 2)]


def batches_of(rank: int, count: int) -> list[Term]:
    """That rank's micro-batches, of unequal sizes and weights."""
    return [data(rank, i, n=1 + (i + rank) % 3, weight=float(1 + (2 * i + rank) % 4)) for i in range(count)]


def windows_of(counts: Sequence[int], steps: int) -> list[list[Term]]:
    """All ranks' micro-batches of each window."""
    every = [batches_of(r, count) for r, count in enumerate(counts)]
    return [[term for mine in every for term in mine[start : start + steps]] for start in range(0, max(counts), steps)]


def run_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


def unsized(items: Iterable[Term]) -> Iterator[Term]:
    yield from items


def regularizer(model: nn.Module) -> Tensor:
    """A mean-type auxiliary loss, which needs the model's output."""
    output: Tensor = model(torch.ones(1, 8, dtype=torch.float64))
    return output.square().mean()


def combined(seed: nn.Module, terms: Sequence[Term]) -> dict[str, Tensor]:
    """The oracle of a per-item loss and a mean-type auxiliary one, each with its own denominator."""
    main = gradient(seed, terms)
    ones = torch.ones(1, 8, dtype=torch.float64)
    zeros = torch.zeros(1, 8, dtype=torch.float64)
    aux = gradient(seed, [Term(ones, zeros)])  # the same in each micro-batch, so its mean over them is itself
    return {name: main[name] + aux[name] for name in main}


def expected(seed: nn.Module, terms: Sequence[Term], mode: str) -> dict[str, Tensor]:
    if mode == "none":
        return gradient(seed, [Term(t.x, t.y) for t in terms])
    return combined(seed, terms) if mode == "ahead with auxiliary" else gradient(seed, terms)


def run_loop(acc: Accumulator, model: nn.Module, row: Arrangement, items: Any, mode: str, **options: Any) -> list[Any]:
    """The gradients of all windows; the collectives of the last one are the caller's to count."""
    found: list[Any] = []
    ahead = mode.startswith("ahead")
    for term in acc.batches(items, weight=(lambda t: t.weight) if ahead else None, **options):
        with acc.step():
            acc.backward(loss_of(model, term), weight=None if mode == "none" else term.weight)
            if mode == "ahead with auxiliary":
                acc.backward(regularizer(model))
        if acc.is_boundary:
            found.append(row.gradients(model))
            model.zero_grad()
    return found


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_case_33_unequal_ranks_give_the_gradient_over_all_samples(
    name: str, counts: tuple[int, int], sized: bool
) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    mine = batches_of(rank(), counts[rank()])
    for mode in ("none", "late", "ahead"):
        found = run_loop(acc, model, row, mine if sized else unsized(mine), mode)
        wanted = [expected(row.seed(), terms, mode) for terms in windows_of(counts, 2)]
        assert len(found) == len(wanted)
        for gradients, oracle in zip(found, wanted, strict=True):
            same(gradients, oracle)
            equal_on_ranks(gradients)
    assert acc.micro_steps == 3 * counts[rank()]
    assert acc.updates == 3 * -(-max(counts) // 2)


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp1-full", "fsdp2"])
@pytest.mark.parametrize("counts", [(5, 6), (1, 4)], ids=str)
def test_counted_ahead_a_window_mixes_two_denominators_and_sends_no_correction(
    name: str, counts: tuple[int, int]
) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    found = run_loop(acc, model, row, batches_of(rank(), counts[rank()]), "ahead with auxiliary")
    for gradients, terms in zip(found, windows_of(counts, 2), strict=True):
        same(gradients, combined(row.seed(), terms))


@on_ranks(4)
@pytest.mark.parametrize("counts", [(3, 5, 4, 1), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_case_33_under_hsdp(counts: tuple[int, ...], sized: bool) -> None:
    row = BY_NAME["hsdp"]
    model = row.build()
    acc = Accumulator(model, 2)
    mine = batches_of(rank(), counts[rank()])
    for mode in ("none", "ahead"):
        found = run_loop(acc, model, row, mine if sized else unsized(mine), mode)
        for gradients, terms in zip(found, windows_of(counts, 2), strict=True):
            same(gradients, expected(row.seed(), terms, mode))


@on_ranks(2)
@pytest.mark.parametrize("counts", [(7, 5), (5, 7), (7, 7)], ids=str)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_a_callable_length_is_not_asked_on_any_rank_for_a_window_that_never_opens(
    counts: tuple[int, int], sized: bool
) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, [2, 4, 1].__getitem__)
    every = [batches_of(r, count) for r, count in enumerate(counts)]
    mine = every[rank()]
    starts = [0, 2, 6, 7]
    for term in acc.batches(mine if sized else unsized(mine)):
        with acc.step():
            acc.backward(loss_of(model, term), weight=term.weight)
        if acc.is_boundary:
            window = slice(starts[acc.updates - 1], starts[acc.updates])
            matches(model, plain_net(), [term for terms in every for term in terms[window]])
            model.zero_grad()
    assert acc.updates == 3


@on_ranks(2)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_another_length_set_at_a_boundary_holds_for_the_next_window_on_every_rank(sized: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    every = [batches_of(r, count) for r, count in enumerate((5, 8))]
    mine = every[rank()]
    starts = [0, 2, 5, 6, 8]
    lengths: list[Any] = [3, lambda update: 1, 4]
    for term in acc.batches(mine if sized else unsized(mine)):
        with acc.step():
            acc.backward(loss_of(model, term))
        if acc.is_boundary:
            window = slice(starts[acc.updates - 1], starts[acc.updates])
            matches(model, plain_net(), [Term(t.x, t.y) for terms in every for t in terms[window]])
            model.zero_grad()
            acc.steps = lengths[min(acc.updates, 3) - 1]
    assert acc.updates == 4


# -- what is sent -----------------------------------------------------------------------------------------------------


def everything_sent(acc: Accumulator, model: nn.Module, items: Any, mode: str) -> list[list[str]]:
    """What reached the process group in each epoch's windows, in order, and at the end of the loop."""
    sent: list[list[str]] = []
    loop = acc.batches(items, weight=(lambda t: t.weight) if mode == "ahead" else None)
    while True:
        with Collectives() as seen:
            term = next(loop, None)
            if term is not None:
                with acc.step():
                    acc.backward(loss_of(model, term), weight=term.weight if mode == "ahead" else None)
        sent.append([f"{entry.kind} {entry.numel} {entry.dtype}" for entry in seen.log])
        if term is None:
            return sent
        if acc.is_boundary:
            model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("mode", ["none", "ahead"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_all_ranks_send_the_same_and_only_what_is_needed(mode: str, sized: bool) -> None:
    row = BY_NAME["ddp"]
    model = row.build()
    acc = Accumulator(model, 2)
    mine = batches_of(rank(), (5, 6)[rank()])
    everything_sent(acc, model, mine, mode)  # DDP talks about its buckets in the first window
    sent = everything_sent(acc, model, mine if sized else unsized(mine), mode)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, sent)
    assert every[0] == every[1]
    flat = [entry for micro in sent for entry in micro]
    gathers = [entry for entry in flat if "int64" in entry]
    sums = [entry for entry in flat if "float64" in entry and " 1 " in entry]
    reductions = [entry for entry in flat if entry not in gathers and entry not in sums]
    assert len(reductions) == 3
    # Once an epoch; for iterables without a length also before the first window, and ahead of each other one.
    assert [[entry in gathers for entry in micro].count(True) for micro in sent] == (
        [1, 0, 0, 0, 0, 0, 0] if sized else [2, 1, 0, 1, 0, 1, 0]
    )
    assert len(sums) == (3 if mode == "ahead" else 0)


# -- padding ----------------------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(x))
        return output


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward inside", "forward outside"])
def test_padding_does_not_move_running_statistics(where: str) -> None:
    torch.manual_seed(1)
    net = Normalised().double()
    alone = copy.deepcopy(net)
    model = ddp(net)  # rank 0, the one that pads, hands its statistics to the others
    with pytest.warns(UserWarning, match="BatchNorm"):
        acc = Accumulator(model, 2)
    mine = [data(rank(), i, n=4) for i in range((1, 4)[rank()])]
    padded = 0
    for term in acc.batches(mine):
        outside = loss_of(model, term) if where == "forward outside" else None
        with acc.step():
            acc.backward(loss_of(model, term) if outside is None else outside)
        padded += acc.is_padding
    for term in mine:
        alone(term.x)
    assert padded == (3, 0)[rank()]
    if rank() == 0:
        same({n: b.double() for n, b in net.named_buffers()}, {n: b.double() for n, b in alone.named_buffers()})


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "ddp-find-unused", "fsdp1-full", "fsdp2"])
def test_a_backward_without_the_library_contributes_nothing_in_a_padding_batch(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    mine = [data(rank(), i) for i in range((1, 4)[rank()])]
    counts = []
    for term in acc.batches(mine):
        with acc.step():
            run_backward(loss_of(model, term) / 2)
        if acc.is_boundary:
            counts.append(row.gradients(model))
            model.zero_grad()
    every = [[data(0, 0), data(1, 0), data(1, 1)], [data(1, 2), data(1, 3)]]
    for found, terms in zip(counts, every, strict=True):
        oracle = gradient(row.seed(), terms)
        same(found, {key: value * len(terms) / 4 for key, value in oracle.items()})


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "ddp-find-unused", "ddp-small-buckets"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_padding_by_a_batch_that_was_dropped_contributes_nothing(name: str, sized: bool) -> None:
    """It is infinite, so even a backward with zeros would put NaN into the gradient."""
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    every = [batches_of(0, 2), batches_of(1, 5)]
    every[0][1] = Term(every[0][1].x * float("inf"), every[0][1].y, 0.0)
    mine = every[rank()]
    windows = [every[0][:1] + every[1][:2], every[1][2:4], every[1][4:]]
    for term in acc.batches(mine if sized else unsized(mine)):
        loss = mean_square(row.forward(model, term.x), term.y)
        with acc.step():
            acc.backward(loss, weight=term.weight if torch.isfinite(loss) else 0)
        if acc.is_boundary:
            found = row.gradients(model)
            same(found, gradient(row.seed(), windows.pop(0)))
            equal_on_ranks(found)
            model.zero_grad()
    assert windows == []


def as_list(term: Term) -> Any:
    return [term.x, term.y]


def as_dict(term: Term) -> Any:
    return {"y": term.y, "x": term.x}


def as_other_mapping(term: Term) -> Any:
    return UserDict(as_dict(term))


def as_nested_list(term: Term) -> Any:
    return ([as_dict(term)], 3)


FORMS = {"list": as_list, "dict": as_dict, "other mapping": as_other_mapping, "nested list": as_nested_list}


@on_ranks(2)
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_a_body_that_takes_its_batch_apart_finds_the_padding_whole(form: str, sized: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    counts = (1, 4)
    mine = batches_of(rank(), counts[rank()])
    windows = windows_of(counts, 2)
    forms = [FORMS[form](term) for term in mine]
    for batch in acc.batches(forms if sized else unsized(forms)):
        inner = batch[0].pop() if isinstance(batch, tuple) else batch
        y = inner.pop() if isinstance(inner, list) else inner.pop("y")
        x = inner.pop() if isinstance(inner, list) else inner.pop("x")
        with acc.step():
            acc.backward(mean_square(model(x), y), weight=len(x))
        if acc.is_boundary:
            matches(model, plain_net(), [Term(t.x, t.y, float(len(t.x))) for t in windows.pop(0)])
            model.zero_grad()
    assert windows == []


@on_ranks(2)
def test_padding_spares_what_no_wrapper_holds() -> None:
    """A head outside DDP: its gradient on a rank is that of this rank's own batches."""
    body, head = ddp(plain_net(1)), plain_net(2)
    acc = Accumulator([body, head], 2)
    mine = batches_of(rank(), (1, 4)[rank()])
    for weighted in (False, True):
        held: list[Term] = []
        for term in acc.batches(mine, weight=(lambda t: t.weight) if weighted else None):
            held += [] if acc.is_padding else [term]
            with acc.step():
                acc.backward(mean_square(head(body(term.x)), term.y), weight=term.weight if weighted else None)
            if acc.is_boundary:
                terms = [t if weighted else Term(t.x, t.y) for t in held]
                if terms:
                    whole_net = nn.Sequential(plain_net(1), plain_net(2))
                    oracle = gradient(whole_net, terms)
                    found = {f"1.{n}": p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
                    same(found, {n: g for n, g in oracle.items() if n.startswith("1.")})
                else:
                    assert not any(p.grad is not None and p.grad.any() for p in head.parameters())
                held = []
                body.zero_grad()
                head.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("way", ["backward", "backward without the library"])
def test_padding_leaves_gradients_in_the_tensors_where_the_user_has_put_them(way: str) -> None:
    """A plain model whose gradients are views of one buffer, which its user reduces himself."""
    model = plain_net()
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, piece in zip(parameters, torch.split(buffer, [p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    acc = Accumulator(model, 2, group=dist.group.WORLD)
    windows = windows_of((1, 4), 2)
    for term in acc.batches(batches_of(rank(), (1, 4)[rank()])):
        with acc.step():
            if way == "backward":
                acc.backward(loss_of(model, term))
            else:
                run_backward(loss_of(model, term))
        if acc.is_boundary:
            dist.all_reduce(buffer)
            terms = windows.pop(0)
            oracle = gradient(plain_net(), [Term(t.x, t.y) for t in terms])
            factor = 0.5 if way == "backward" else 1 / len(terms)
            same({name: grad * factor for name, grad in grads_of(model).items()}, oracle)
            buffer.zero_()
    assert windows == []


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@on_ranks(2)
def test_a_padding_block_that_fails_before_backward_can_be_run_again() -> None:
    body, head = ddp(plain_net(1)), plain_net(2)
    acc = Accumulator([body, head], 4)
    for index, term in enumerate(acc.batches(batches_of(rank(), (1, 4)[rank()]))):
        if index == 2:
            with pytest.raises(MemoryError), acc.step():
                raise MemoryError
        with acc.step():
            acc.backward(mean_square(head(body(term.x)), term.y))
    assert acc.is_boundary
    oracle = gradient(nn.Sequential(plain_net(1), plain_net(2)), [Term(t.x, t.y) for t in windows_of((1, 4), 4)[0]])
    same(grads_of(body), {f"module.{n[2:]}": g for n, g in oracle.items() if n.startswith("0.")})


@on_ranks(2)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_the_last_batch_is_the_last_on_every_rank(sized: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    mine = batches_of(rank(), (5, 2)[rank()])
    flags = []
    for term in acc.batches(mine if sized else unsized(mine)):
        flags.append((acc.is_last, acc.is_padding))
        with acc.step():
            acc.backward(loss_of(model, term))
        if acc.is_boundary:
            model.zero_grad()
    padding = [False, False, rank() == 1, rank() == 1, rank() == 1]
    assert flags == list(zip([False] * 4 + [True], padding, strict=True))
    assert acc.micro_steps == (5, 2)[rank()]


@on_ranks(2)
def test_loss_reports_leave_padding_out() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 4)
    mine = batches_of(rank(), (1, 4)[rank()])
    everyone = [batches_of(r, n) for r, n in enumerate((1, 4))]
    for weighted in (False, True):
        for term in acc.batches(mine):
            with acc.step():
                acc.backward(loss_of(model, term), weight=term.weight if weighted else None)
        model.zero_grad()

        def mean(terms: Sequence[Term], weighted: bool = weighted) -> float:
            weights = [t.weight if weighted else 1.0 for t in terms]
            with torch.no_grad():
                losses = [float(loss_of(model, t)) for t in terms]
            return sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)

        assert acc.loss == pytest.approx(mean(mine))
        assert acc.global_loss() == pytest.approx(mean([t for terms in everyone for t in terms]))


@on_ranks(2)
def test_carry_with_unequal_ranks_is_exact() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 4)
    counts = (5, 6)
    every = [batches_of(r, n) for r, n in enumerate(counts)]
    held: list[Term] = []
    windows = 0
    for _ in range(3):
        for index, term in enumerate(acc.batches(unsized(every[rank()]), last="carry")):
            held += [terms[index] for terms in every if index < len(terms)]
            with acc.step():
                acc.backward(loss_of(model, term))
            if acc.is_boundary:
                matches(model, plain_net(), [Term(t.x, t.y) for t in held])
                windows, held = windows + 1, []
                model.zero_grad()
    assert windows == 4  # 18 micro-batches


# -- errors on every rank ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_case_35_a_rank_without_any_batch_is_an_error_on_every_rank(sized: bool) -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    mine = batches_of(rank(), (3, 0)[rank()])
    with pytest.raises(AccumulateError, match=r"2, 0 batches .* rank 1 has none"):
        next(acc.batches(mine if sized else unsized(mine)))
    assert list(acc.batches([])) == []
    assert list(acc.batches(unsized([]))) == []
    for term in acc.batches(batches_of(rank(), 2)):
        with acc.step():
            acc.backward(loss_of(model, term), weight=term.weight)
    matches(model, plain_net(), batches_of(0, 2) + batches_of(1, 2))


@on_ranks(2)
@pytest.mark.parametrize("argument", ["weight", "last"])
def test_different_arguments_are_an_error_on_every_rank(argument: str) -> None:
    acc = Accumulator(ddp(plain_net()), 2)
    options: dict[str, Any] = {"weight": len} if argument == "weight" else {"last": "carry"}
    with pytest.raises(AccumulateError, match=r"different weight= or last="):
        next(acc.batches(batches_of(0, 2), **(options if rank() else {})))


@on_ranks(2)
def test_one_rank_sized_and_one_not_agree_window_by_window() -> None:
    model = ddp(plain_net())
    acc = Accumulator(model, 2)
    mine = batches_of(rank(), (3, 4)[rank()])
    found = run_loop(acc, model, BY_NAME["ddp"], unsized(mine) if rank() else mine, "late")
    for gradients, terms in zip(found, windows_of((3, 4), 2), strict=True):
        same(gradients, gradient(plain_net(), terms))


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_case_52_a_second_accumulator_in_the_loop_is_told_of_padding(name: str) -> None:
    row = BY_NAME[name]
    first, second = row.build(), row.build()
    acc, other = Accumulator(first, 2), Accumulator(second, 3)
    counts = (2, 5)
    found: list[dict[str, Tensor]] = []
    for term in acc.batches(batches_of(rank(), counts[rank()])):
        with acc.step():
            acc.backward(loss_of(first, term))
        with other.step(acc.is_last or None):
            other.backward(loss_of(second, term), weight=0 if acc.is_padding else 1)
        if acc.is_boundary:
            first.zero_grad()
        if other.is_boundary:
            found.append(row.gradients(second))
            second.zero_grad()
    assert (acc.updates, other.updates) == (3, 2)
    for gradients, terms in zip(found, windows_of(counts, 3), strict=True):
        same(gradients, gradient(row.seed(), [Term(t.x, t.y) for t in terms]))
