"""Properties of the formula, on an unwrapped float64 model: whatever the data, the split, the order and the
weights are.
"""

from __future__ import annotations

from random import Random

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from accumulate import Accumulator
from support.loops import feed, grads, loss_of, plain_net
from support.oracle import Term, gradient, same

# No deadline: the first example pays for torch's own initialisation. Derandomised: a red build must be red again.
battery = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

sizes = st.lists(st.integers(1, 7), min_size=1, max_size=6)
seeds = st.integers(0, 2**16)
weights = st.lists(st.integers(1, 1000) | st.floats(1e-3, 1e3), min_size=1, max_size=6)


def batch(seed: int, n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, dtype=torch.float64, generator=draw)
    return x, torch.randn(n, 8, dtype=torch.float64, generator=draw)


def parts(seed: int, sizes: list[int]) -> list[Term]:
    """The batch of that seed, cut into micro-batches of these sizes that weigh what they hold."""
    pairs = zip(*(torch.split(whole, sizes) for whole in batch(seed, sum(sizes))), strict=True)
    return [Term(x, y, float(len(x))) for x, y in pairs]


def accumulated(terms: list[Term], weighted: bool = True, steps: int | None = None) -> dict[str, Tensor]:
    """The gradient of one window; flushed if it is shorter than ``steps``."""
    model = plain_net()
    acc = Accumulator(model, steps or len(terms))
    feed(acc, model, terms, weighted)
    assert acc.is_boundary or acc.flush()
    return grads(model)


@battery
@given(seeds, sizes)
def test_any_split_of_a_batch_gives_the_whole_batchs_gradient(seed: int, sizes: list[int]) -> None:
    whole = Term(*batch(seed, sum(sizes)))
    same(accumulated(parts(seed, sizes)), gradient(plain_net(), [whole]), 1e-9)


@battery
@given(seeds, sizes, st.integers(0, 5))
def test_a_window_closed_early_gives_the_same_as_a_full_one(seed: int, sizes: list[int], missing: int) -> None:
    terms = parts(seed, sizes)
    for weighted in (True, False):
        short = accumulated(terms, weighted, steps=len(terms) + missing)
        same(short, accumulated(terms, weighted), 1e-9)


@battery
@given(seeds, sizes, st.randoms(use_true_random=False))
def test_the_order_in_a_window_is_irrelevant(seed: int, sizes: list[int], random: Random) -> None:
    terms = parts(seed, sizes)
    shuffled = list(terms)
    random.shuffle(shuffled)
    same(accumulated(shuffled), accumulated(terms), 1e-9)


@battery
@given(seeds, weights, st.floats(1e-4, 1e4))
def test_scaling_all_weights_changes_nothing(seed: int, weights: list[float], factor: float) -> None:
    terms = [Term(*batch(seed + index, 3), float(weight)) for index, weight in enumerate(weights)]
    scaled = [term._replace(weight=term.weight * factor) for term in terms]
    same(accumulated(scaled), accumulated(terms), 1e-9)
    same(accumulated(terms), gradient(plain_net(), terms), 1e-9)


@battery
@given(seeds, st.integers(1, 9), st.none() | st.floats(1e-3, 1e3))
def test_windows_of_one_are_the_identity(seed: int, n: int, weight: float | None) -> None:
    term = Term(*batch(seed, n), 1.0 if weight is None else weight)
    reference = plain_net()
    loss_of(reference, term).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    found = accumulated([term], weighted=weight is not None)
    same(found, grads(reference), 1e-12)
    if weight is None:
        assert all(torch.equal(found[name], value) for name, value in grads(reference).items())


@battery
@given(seeds, st.lists(sizes, min_size=2, max_size=4))
def test_a_window_knows_nothing_of_the_windows_before_it(seed: int, windows: list[list[int]]) -> None:
    model = plain_net()
    acc = Accumulator(model, lambda update: len(windows[update]))
    for index, sizes in enumerate(windows):
        terms = parts(seed + index, sizes)
        feed(acc, model, terms, weighted=True)
        assert acc.is_boundary
        same(grads(model), gradient(plain_net(), terms), 1e-9)
        model.zero_grad()


@battery
@given(seeds, sizes, st.data())
def test_a_dropped_micro_batch_is_as_if_it_had_not_been(seed: int, sizes: list[int], data: st.DataObject) -> None:
    terms = parts(seed, sizes)
    kept = [data.draw(st.booleans()) for _ in terms]
    if not any(kept):
        kept[0] = True
    model = plain_net()
    acc = Accumulator(model, len(terms))
    for term, keep in zip(terms, kept, strict=True):
        with acc.step():
            loss = loss_of(model, term)
            acc.backward(loss if keep else loss * float("nan"), weight=term.weight if keep else 0)
    assert acc.is_boundary
    same(grads(model), gradient(plain_net(), [term for term, keep in zip(terms, kept, strict=True) if keep]), 1e-9)
