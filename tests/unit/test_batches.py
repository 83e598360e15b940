"""``batches()`` on one process: what it hands out, what it knows ahead, and what it never leaves behind."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accumulate import AccumulateError, Accumulator, WindowError
from support.loops import data, loss_of, plain_net
from support.oracle import Term, gradient, same


def terms(count: int) -> list[Term]:
    return [data(0, i, n=1 + i % 3, weight=float(1 + i % 4)) for i in range(count)]


def generator(count: int) -> Iterator[Term]:
    yield from terms(count)


def run(acc: Accumulator, model: nn.Module, term: Term, weight: float | None = None) -> None:
    with acc.step():
        acc.backward(loss_of(model, term), weight=weight)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean(several: list[Term]) -> dict[str, Tensor]:
    """The oracle without weights."""
    return gradient(plain_net(), [Term(t.x, t.y) for t in several])


def squares(model: nn.Module) -> Tensor:
    total: Tensor = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return total


class Stream(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(8 * self.count)).reshape(self.count, 8).double())


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["list", "generator", "iterator of a list"])
def test_case_8_and_22_a_short_last_window_is_a_boundary_in_every_epoch(source: str) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    for epoch in range(3):
        items: Any = {"list": terms(7), "generator": generator(7), "iterator of a list": iter(terms(7))}[source]
        closed: list[int] = []
        for index, term in enumerate(acc.batches(items)):
            run(acc, model, term)
            if acc.is_boundary:
                start = 4 * len(closed)
                same(grads(model), mean(terms(7)[start : index + 1]))
                closed.append(index)
                model.zero_grad()
        assert closed == [3, 6]
        assert (acc.updates, acc.micro_steps, acc.position) == (2 * (epoch + 1), 7 * (epoch + 1), 0)


def test_case_21_carry_lets_windows_straddle_epochs() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    seen: list[Term] = []
    windows = 0
    for epoch in range(4):
        for term in acc.batches(terms(7), last="carry"):
            seen.append(term)
            run(acc, model, term)
            if acc.is_boundary:
                same(grads(model), mean(seen))
                windows, seen = windows + 1, []
                model.zero_grad()
        assert acc.position == (7 * (epoch + 1)) % 4
    assert windows == 7
    assert seen == []


def test_a_carried_window_is_closed_by_a_last_loop_that_closes() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    for term in acc.batches(terms(2), last="carry"):
        run(acc, model, term)
    for term in acc.batches(terms(1)):
        run(acc, model, term)
    assert acc.is_boundary
    same(grads(model), mean([*terms(2), *terms(1)]))


@pytest.mark.parametrize("source", [terms, generator])
def test_is_last_is_true_on_the_last_batch_only(source: Any) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    assert not acc.is_last
    last = []
    for term in acc.batches(source(5)):
        last.append(acc.is_last)
        run(acc, model, term)
        assert not acc.is_padding
    assert last == [False, False, False, False, True]
    assert not acc.is_last


def test_an_empty_iterable_yields_nothing() -> None:
    acc = Accumulator(plain_net(), 2)
    assert list(acc.batches([])) == []
    assert list(acc.batches(generator(0))) == []
    assert acc.updates == 0


def test_case_26_a_new_length_counts_from_the_next_window() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    sizes, held = [], 0
    for term in acc.batches(generator(11)):
        held += 1
        if acc.updates == 2:
            acc.steps = 4
        run(acc, model, term)
        if acc.is_boundary:
            sizes.append(held)
            held = 0
            model.zero_grad()
    assert sizes == [2, 2, 2, 4, 1]  # it was set when the third window had been planned


def test_a_callable_length_is_asked_once_for_each_update() -> None:
    model, asked = plain_net(), []

    def steps(update: int) -> int:
        asked.append(update)
        return update + 1

    acc = Accumulator(model, steps)
    sizes, held = [], 0
    for term in acc.batches(generator(9)):
        held += 1
        run(acc, model, term)
        if acc.is_boundary:
            sizes.append(held)
            held = 0
            model.zero_grad()
    assert sizes == [1, 2, 3, 3]
    assert asked == sorted(set(asked))


@pytest.mark.parametrize("source", [terms, generator])
@pytest.mark.parametrize("last", ["close", "carry"])
def test_a_callable_length_is_not_asked_for_a_window_that_never_opens(source: Any, last: Any) -> None:
    model = plain_net()
    acc = Accumulator(model, [2, 4, 1].__getitem__)
    for term in acc.batches(source(7), last=last):
        run(acc, model, term)
        if acc.is_boundary:
            model.zero_grad()
    assert (acc.updates, acc.position) == (3, 0)


@pytest.mark.parametrize("source", [terms, generator])
def test_a_window_closed_early_by_the_caller_ends_there(source: Any) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    held: list[Term] = []
    sizes = []
    for index, term in enumerate(acc.batches(source(9))):
        held.append(term)
        with acc.step(boundary=True if index == 1 else None):
            acc.backward(loss_of(model, term))
        if acc.is_boundary:
            same(grads(model), mean(held))
            sizes.append(len(held))
            held = []
            model.zero_grad()
    assert sizes == [2, 4, 3]


def test_a_window_kept_open_by_the_caller_goes_on() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    held: list[Term] = []
    sizes = []
    for index, term in enumerate(acc.batches(generator(6))):
        held.append(term)
        with acc.step(boundary=False if index in (1, 2) else None):
            acc.backward(loss_of(model, term))
        if acc.is_boundary:
            same(grads(model), mean(held))
            sizes.append(len(held))
            held = []
            model.zero_grad()
    assert sizes == [4, 2]


def test_flush_inside_the_loop_closes_the_window_and_the_loop_goes_on() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    sizes, held = [], 0
    for index, term in enumerate(acc.batches(terms(7))):
        run(acc, model, term)
        held += 1
        if acc.is_boundary or (index == 0 and acc.flush()):
            sizes.append(held)
            held = 0
            model.zero_grad()
    assert sizes == [1, 4, 2]


@pytest.mark.parametrize("before", range(8))
@pytest.mark.parametrize("source", [terms, generator])
@pytest.mark.parametrize("mode", ["none", "late", "ahead"])
def test_flush_between_a_batch_and_its_block_begins_a_window_that_ends_with_the_data(
    source: Any, before: int, mode: str
) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    held: list[Term] = []
    counted = 0

    def check() -> None:
        same(grads(model), mean(held) if mode == "none" else gradient(plain_net(), held))
        model.zero_grad()

    for index, term in enumerate(acc.batches(source(7), weight=(lambda t: t.weight) if mode == "ahead" else None)):
        if index == before and acc.flush():
            check()
            counted, held = counted + len(held), []
        held.append(term)
        run(acc, model, term, None if mode == "none" else term.weight)
        if acc.is_boundary:
            check()
            counted, held = counted + len(held), []
    assert (counted, acc.position) == (7, 0)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_reset_between_a_batch_and_its_block_begins_the_window_with_it(first: int) -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    held: list[Term] = []
    sizes = []
    for index, term in enumerate(acc.batches(terms(5))):
        if index == first:
            acc.reset()
            held = []
        held.append(term)
        run(acc, model, term)
        if acc.is_boundary:
            same(grads(model), mean(held))
            sizes.append(len(held))
            held = []
            model.zero_grad()
    assert sizes == {0: [3, 2], 1: [2, 2], 2: [1, 2], 3: [3, 2]}[first]


def test_the_block_of_a_batch_can_be_run_again_after_reset() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    sizes: list[int] = []
    for index, term in enumerate(acc.batches(terms(5))):
        if index == 1:
            with pytest.raises(MemoryError), acc.step():
                acc.backward(loss_of(model, term))
                raise MemoryError
            acc.reset()
        run(acc, model, term)
        if acc.is_boundary:
            same(grads(model), mean(terms(5)[1:3] if not sizes else terms(5)[3:]))
            sizes.append(index)
            model.zero_grad()
    assert sizes == [2, 4]


# -- weights ahead ----------------------------------------------------------------------------------------------------


def test_case_7_a_per_token_loss_and_a_mean_type_one_each_have_their_own_denominator() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    held: list[Term] = []
    for term in acc.batches(generator(5), weight=lambda t: t.weight):
        held.append(term)
        with acc.step():
            acc.backward(loss_of(model, term), weight=term.weight)
            acc.backward(squares(model) / len(term.x))
        if acc.is_boundary:
            found = grads(model)
            main = gradient(plain_net(), held)
            each = sum(1 / len(t.x) for t in held) / len(held)
            aux = {name: 2 * p.detach() * each for name, p in model.named_parameters()}
            same(found, {name: main[name] + aux[name] for name in main})
            with torch.no_grad():
                total = sum(t.weight * float(loss_of(model, t)) for t in held) / sum(t.weight for t in held)
                total += float(squares(model)) * each
            assert acc.loss == pytest.approx(total)
            assert acc.global_loss() == pytest.approx(total)
            held = []
            model.zero_grad()


@pytest.mark.parametrize("kind", ["number", "tensor", "function gives tensors"])
def test_weights_counted_ahead_need_no_correction(kind: str) -> None:
    model = plain_net()
    acc = Accumulator(model, 3)

    def count(term: Term) -> float | Tensor:
        return torch.tensor(term.weight) if kind == "function gives tensors" else term.weight

    before: list[Tensor] = []
    for term in acc.batches(terms(3), weight=count):
        with acc.step():
            acc.backward(loss_of(model, term), weight=term.weight if kind == "number" else torch.tensor(term.weight))
            if acc.is_boundary:
                before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    same(grads(model), gradient(plain_net(), terms(3)))
    assert all(torch.equal(a, b) for a, b in zip(before, grads(model).values(), strict=True))


def test_without_counting_ahead_mixing_is_refused_with_that_advice() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for term in acc.batches(terms(1)):
        with pytest.raises(WindowError, match=r"batches\(loader, weight=fn\)"), acc.step():
            acc.backward(loss_of(model, term), weight=3)
            acc.backward(loss_of(model, term))
        acc.reset()


def test_a_weight_that_contradicts_the_count_ahead_is_named() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for _ in acc.batches(terms(1), weight=lambda t: 5):
        with pytest.raises(WindowError, match=r"weight=7.*counted as 5"), acc.step():
            acc.backward(loss_of(model, data(0, 0)), weight=7)
        acc.reset()


def test_a_window_of_weight_zero_counted_ahead_has_zero_gradients() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for term in acc.batches(terms(2), weight=lambda t: torch.zeros(())):
        with acc.step():
            acc.backward(loss_of(model, term), weight=torch.zeros(()))
    assert acc.is_boundary
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_window_of_weight_zero_counted_ahead_may_be_kept_open_for_more(as_tensors: bool) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    items = [term._replace(weight=weight) for term, weight in zip(terms(4), (0.0, 0.0, 3.0, 2.0), strict=True)]

    def count(term: Term) -> float | Tensor:
        return torch.tensor(term.weight) if as_tensors else term.weight

    for index, term in enumerate(acc.batches(items, weight=count)):
        with acc.step(boundary=index == 3):
            acc.backward(loss_of(model, term), weight=count(term))
    same(grads(model), gradient(plain_net(), items))


def test_a_mixed_window_closed_early_is_refused() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    loop = acc.batches(terms(3), weight=lambda t: t.weight)
    for term in loop:
        with pytest.raises(AccumulateError, match="closed early by hand"), acc.step(boundary=True):
            acc.backward(loss_of(model, term), weight=term.weight)
            acc.backward(loss_of(model, term))
        break
    acc.reset()


# -- what a loop must not leave behind --------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["step", "batches"])
@pytest.mark.parametrize("way", ["break", "exception in the body", "exception in the loader"])
def test_case_24_a_loop_left_in_mid_window_is_not_inherited(after: str, way: str) -> None:
    model = plain_net()
    acc = Accumulator(model, 4)

    def source() -> Iterator[Term]:
        yield from terms(6)
        raise OSError("disk")

    seen = 0
    try:
        for term in acc.batches(source() if way == "exception in the loader" else terms(7)):
            run(acc, model, term)
            seen += 1
            if acc.is_boundary:
                model.zero_grad()
            elif seen == 6 and way == "break":
                break
            elif seen == 6 and way == "exception in the body":
                raise OSError("body")
    except OSError as error:
        kept = error  # its traceback keeps the loop's frame alive
        assert kept.__traceback__ is not None
    assert (seen, acc.position) == (6, 2)
    with pytest.raises(WindowError, match=r"flush\(\).*reset\(\)"):
        if after == "step":
            run(acc, model, terms(1)[0])
        else:
            next(iter(acc.batches(terms(1))))
    acc.flush()
    same(grads(model), mean(terms(6)[4:]))
    model.zero_grad()
    for term in acc.batches(terms(4)):
        run(acc, model, term)
    same(grads(model), mean(terms(4)))


def test_break_at_a_boundary_leaves_nothing() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for term in acc.batches(terms(7)):
        run(acc, model, term)
        if acc.is_boundary:
            break
    model.zero_grad()
    run(acc, model, terms(1)[0])
    assert acc.position == 1


def test_case_23_an_evaluation_loop_in_mid_window_changes_nothing() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    loader = DataLoader(TensorDataset(torch.randn(6, 8).double()), batch_size=2)
    for index, term in enumerate(acc.batches(terms(4))):
        run(acc, model, term)
        if index in (1, 2):
            model.eval()
            with torch.no_grad():
                for (x,) in loader:
                    model(x)
                    if index == 2:
                        break
            model.train()
    assert acc.is_boundary
    same(grads(model), mean(terms(4)))


def test_a_second_loop_in_mid_window_is_refused_and_the_first_goes_on() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    for index, term in enumerate(acc.batches(terms(4))):
        run(acc, model, term)
        if index == 1:
            with pytest.raises(
                WindowError, match=r"batches\(\) begins while a window is open after micro-batch 2 of 4"
            ):
                next(iter(acc.batches(terms(2))))
    assert acc.is_boundary
    same(grads(model), mean(terms(4)))


@pytest.mark.parametrize("count", [2, 3])
def test_only_the_window_that_a_loop_has_carried_goes_on_in_the_next(count: int) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for term in acc.batches(terms(count), last="carry"):
        run(acc, model, term)
    assert acc.flush() == (count == 3)
    model.zero_grad()
    run(acc, model, terms(1)[0])
    with pytest.raises(WindowError, match=r"batches\(\) begins while a window is open after micro-batch 1 of 2"):
        next(iter(acc.batches(terms(2))))


def test_a_loop_that_another_one_has_replaced_says_so() -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    first, second = acc.batches(terms(3)), acc.batches(terms(3))
    run(acc, model, next(first))
    run(acc, model, next(second))
    with pytest.raises(WindowError, match="another one has begun"):
        next(first)
    run(acc, model, next(second))


def test_each_batch_needs_exactly_one_block() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    loop = acc.batches(terms(4))
    run(acc, model, next(loop))
    with pytest.raises(WindowError, match="second step"):
        run(acc, model, terms(1)[0])
    next(loop)
    with pytest.raises(WindowError, match="not been through a completed step"):
        next(loop)


def test_a_block_that_failed_before_backward_can_be_run_again() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for index, term in enumerate(acc.batches(terms(2))):
        if index == 1:
            with pytest.raises(MemoryError), acc.step():
                raise MemoryError
        run(acc, model, term)
    assert acc.is_boundary
    same(grads(model), mean(terms(2)))


def test_after_reset_the_loop_plans_anew() -> None:
    model = plain_net()
    acc = Accumulator(model, 3)
    held: list[Term] = []
    for index, term in enumerate(acc.batches(generator(6))):
        if index == 1:
            with pytest.raises(RuntimeError, match="no"), acc.step():
                acc.backward(loss_of(model, term))
                raise RuntimeError("no")
            acc.reset()
            held = []
            continue
        held.append(term)
        run(acc, model, term)
        if acc.is_boundary:
            same(grads(model), mean(held))
            held = []
            model.zero_grad()
    assert (acc.updates, acc.position) == (2, 0)


def test_what_the_iterable_raises_comes_when_its_batch_is_due() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)

    def source() -> Iterator[Term]:
        yield from terms(3)
        raise ConnectionError("lost")

    seen = 0
    with pytest.raises(ConnectionError, match="lost"):
        for term in acc.batches(source()):
            run(acc, model, term)
            seen += 1
            if acc.is_boundary:
                model.zero_grad()
    assert (seen, acc.updates, acc.position) == (3, 1, 1)


def test_no_batch_and_no_worker_process_is_kept_alive() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    loader = DataLoader(Stream(40), batch_size=1, num_workers=1, multiprocessing_context="fork")
    alive: list[Any] = []
    others = set(multiprocessing.active_children())
    for x in acc.batches(loader):
        alive.append(weakref.ref(x))
        with acc.step():
            acc.backward(model(x).square().mean())
        if len(alive) == 6:
            break
    del x
    acc.reset()
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []
    assert set(multiprocessing.active_children()) == others


def test_an_iterator_of_the_users_is_not_closed(tmp_path: Path) -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    everything = generator(12)
    sizes = []
    for _ in range(3):
        seen = 0
        for term in acc.batches(everything):
            run(acc, model, term)
            seen += 1
            if seen == 4:
                model.zero_grad()
                break
            if acc.is_boundary:
                model.zero_grad()
        sizes.append(seen)
    assert sizes == [4, 4, 0]  # what was pulled ahead when a loop was left is gone, but no more
    (tmp_path / "indices").write_text("0\n1\n2\n")
    with (tmp_path / "indices").open() as file:
        for _ in range(2):
            file.seek(0)
            for line in acc.batches(file):
                run(acc, model, data(0, int(line)))
                if acc.is_boundary:
                    model.zero_grad()
    assert acc.updates == 8


def test_a_kept_traceback_keeps_no_worker_process() -> None:
    before = multiprocessing.active_children()
    model = plain_net()
    acc = Accumulator(model, 2)
    loader = DataLoader(Stream(40), batch_size=1, num_workers=1, multiprocessing_context="fork")
    counted = []

    def count(x: Tensor) -> int:
        counted.append(weakref.ref(x))
        if len(counted) == 5:
            raise ValueError("cannot be counted")
        return len(x)

    with pytest.raises(ValueError, match="cannot be counted") as kept:
        for x in acc.batches(loader, weight=count):
            with acc.step():
                acc.backward(model(x).square().mean(), weight=len(x))
            if acc.is_boundary:
                model.zero_grad()
    assert kept.value.__traceback__ is not None
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def test_an_unsized_loader_with_workers_is_looked_ahead() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    loader = DataLoader(Stream(7), batch_size=None, num_workers=1, multiprocessing_context="fork")
    boundaries = []
    for x in acc.batches(loader):
        with acc.step():
            acc.backward(model(x).square().mean())
        boundaries.append(acc.is_boundary)
        if acc.is_boundary:
            model.zero_grad()
    assert boundaries == [False, False, False, True, False, False, True]


def test_a_sized_iterable_is_not_pulled_ahead() -> None:
    pulled: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Term]:
            for index, term in enumerate(terms(6)):
                pulled.append(index)
                yield term

    model = plain_net()
    acc = Accumulator(model, 3)
    for index, term in enumerate(acc.batches(Lazy())):
        assert pulled == list(range(index + 1))
        run(acc, model, term)
        if acc.is_boundary:
            model.zero_grad()


def test_an_unsized_iterable_is_pulled_one_window_ahead_at_most() -> None:
    pulled: list[int] = []

    def source() -> Iterator[Term]:
        for index, term in enumerate(terms(12)):
            pulled.append(index)
            yield term

    model = plain_net()
    acc = Accumulator(model, 3)
    for index, term in enumerate(acc.batches(source())):
        assert len(pulled) <= index + 1 + 3
        run(acc, model, term)
        if acc.is_boundary:
            model.zero_grad()
    assert len(pulled) == 12


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        ((3,), {}, TypeError, "iterable of batches, got 3"),
        (([1],), {"weight": 4}, TypeError, "weight must be a function"),
        (([1],), {"last": "drop"}, ValueError, "'close' or 'carry', got 'drop'"),
        (([1],), {"last": "carry", "weight": len}, ValueError, "weight=fn counts a window ahead"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments: Any, options: Any, error: type[Exception], says: str) -> None:
    acc = Accumulator(plain_net(), 2)
    with pytest.raises(error, match=says):
        acc.batches(*arguments, **options)


@pytest.mark.parametrize(
    ("claims", "has", "says"), [(5, 3, "is 5, but it ended after 3"), (3, 5, "is 3, but it has more")]
)
def test_a_wrong_length_is_an_error(claims: int, has: int, says: str) -> None:
    class Liar(list[Term]):
        def __len__(self) -> int:
            return claims

    model = plain_net()
    acc = Accumulator(model, 2)
    with pytest.raises(AccumulateError, match=says):
        for term in acc.batches(Liar(terms(has))):
            run(acc, model, term)
            if acc.is_boundary:
                model.zero_grad()


def test_a_function_that_counts_wrongly_is_an_error_when_its_batch_is_due() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    for value, error in ((-1, ValueError), (float("nan"), ValueError), ("4", TypeError), (None, TypeError)):
        with pytest.raises(error, match="weight must be"):
            next(iter(acc.batches(terms(2), weight=lambda t, value=value: value)))  # type: ignore[misc]  # bad on purpose


def test_a_function_that_raises_stop_iteration_does_not_end_the_data_silently() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    counts = iter([1.0, 1.0, 1.0])
    seen = 0
    with pytest.raises(RuntimeError, match="StopIteration"):
        for term in acc.batches(terms(5), weight=lambda t: next(counts)):
            run(acc, model, term, weight=1.0)
            seen += 1
            if acc.is_boundary:
                model.zero_grad()
    assert seen == 3


def test_batches_of_a_closed_accumulator_or_inside_a_block_are_refused() -> None:
    model = plain_net()
    acc = Accumulator(model, 2)
    with acc.step():
        with pytest.raises(WindowError, match="inside a step"):
            next(iter(acc.batches(terms(1))))
        acc.backward(loss_of(model, terms(1)[0]))
    acc.close()
    with pytest.raises(WindowError, match="closed"):
        next(iter(acc.batches(terms(1))))
