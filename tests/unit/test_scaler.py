"""``scaler=`` on one process: a window holds one factor, is unscaled once and updates the scaler once, whoever does it.

float64 models and factors that are powers of two, so that scaling and unscaling round nothing.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accumulate import Accumulator, WindowError
from support.loops import data, feed, grads, loss_of, matches, plain_net, whole
from support.oracle import Term, gradient, same

FACTOR = 1024.0
INF = float("inf")


class Counted(GradScaler):
    """A scaler that counts what a window may do once."""

    def __init__(self, **options: Any) -> None:
        super().__init__("cpu", init_scale=FACTOR, **options)
        self.unscaled = self.updated = 0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled += 1
        super().unscale_(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        self.updated += 1
        super().update(new_scale)


def halves(model: nn.Module, lr: float = 0.1) -> tuple[torch.optim.SGD, torch.optim.SGD]:
    """One optimizer for each linear layer of ``plain_net``."""
    first, _, last = cast("nn.Sequential", model)
    return torch.optim.SGD(first.parameters(), lr=lr), torch.optim.SGD(last.parameters(), lr=lr)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def spoil(model: nn.Module, term: Term) -> Tensor:
    """A loss whose gradient is infinite in the last layer only; what it sends further back is finite."""
    last = cast("nn.Sequential", model)[2]
    return loss_of(model, term) + (cast("nn.Linear", last).bias[0] * INF)


# -- one window -------------------------------------------------------------------------------------------------------


def test_gradients_hold_the_factor_and_the_reported_loss_does_not() -> None:
    model, scaler = plain_net(), Counted()
    acc = Accumulator(model, 2, scaler=scaler)
    terms = [data(0, 0, 3, 3.0), data(0, 1, 5, 5.0)]
    losses = []
    for term in terms:
        with acc.step():
            loss = loss_of(model, term)
            acc.backward(loss, weight=term.weight)
            losses.append(loss.item())
    reference = gradient(plain_net(), [whole(terms)])
    same(grads(model), {name: FACTOR * value for name, value in reference.items()})
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
    same(grads(model), reference)
    assert acc.loss is not None
    assert float(acc.loss) == pytest.approx((3 * losses[0] + 5 * losses[1]) / 8)


def test_scale_gives_what_backward_runs() -> None:
    model = plain_net()
    acc = Accumulator(model, 2, scaler=Counted())
    for index in range(2):
        with acc.step():
            acc.scale(loss_of(model, data(0, index))).backward()  # type: ignore[no-untyped-call]  # torch's
    reference = gradient(plain_net(), [data(0, 0), data(0, 1)])
    same(grads(model), {name: FACTOR * value for name, value in reference.items()})


def by_optimizer_step(acc: Accumulator, scaler: GradScaler, optimizer: Any, max_norm: float) -> None:
    assert acc.optimizer_step(optimizer, max_norm=max_norm)


def unscaled_by_the_user(acc: Accumulator, scaler: GradScaler, optimizer: Any, max_norm: float) -> None:
    scaler.unscale_(optimizer)
    assert acc.optimizer_step(optimizer, max_norm=max_norm)


def clipped_first(acc: Accumulator, scaler: GradScaler, optimizer: Any, max_norm: float) -> None:
    acc.clip_grad_norm_(max_norm)
    assert acc.optimizer_step(optimizer)


def all_by_the_user_but_clipping(acc: Accumulator, scaler: GradScaler, optimizer: Any, max_norm: float) -> None:
    acc.clip_grad_norm_(max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def as_torch_documents_it(acc: Accumulator, scaler: GradScaler, optimizer: Any, max_norm: float) -> None:
    scaler.unscale_(optimizer)
    acc.clip_grad_norm_(max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


WAYS = [
    by_optimizer_step,
    unscaled_by_the_user,
    clipped_first,
    all_by_the_user_but_clipping,
    as_torch_documents_it,
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_case_36_clipping_sees_the_unscaled_gradient_whoever_unscales(
    way: Callable[[Accumulator, GradScaler, Any, float], None], fused: bool
) -> None:
    model, plain = plain_net(), plain_net()
    scaler = GradScaler("cpu", init_scale=FACTOR, growth_interval=2)  # grows between the windows as well
    acc, reference = Accumulator(model, 2, scaler=scaler), Accumulator(plain, 2)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1, fused=fused) for m in (model, plain))
    for window in range(5):
        for index in range(2):
            term = data(0, 10 * window + index)
            feed(acc, model, [term])
            feed(reference, plain, [term])
        way(acc, scaler, optimizer, 0.05)
        assert reference.optimizer_step(other, max_norm=0.05)
        assert acc.grad_norm is not None
        assert reference.grad_norm is not None
        assert float(reference.grad_norm) > 0.05
        assert float(acc.grad_norm) == pytest.approx(float(reference.grad_norm), rel=1e-9)
        same(parameters(model), parameters(plain), 1e-6)
    assert scaler.get_scale() == 4 * FACTOR


def test_case_37_one_unscale_for_each_optimizer_and_one_update_for_each_window() -> None:
    model, scaler = plain_net(), Counted(growth_interval=3)
    acc, optimizers = Accumulator(model, 2, scaler=scaler), halves(model)
    for window in range(3):
        for index in range(2):
            feed(acc, model, [data(0, 2 * window + index)])
            assert acc.optimizer_step(*optimizers) == acc.is_boundary
            assert not acc.optimizer_step(*optimizers)  # once more does nothing
    assert (scaler.unscaled, scaler.updated) == (6, 3)
    assert scaler.get_scale() == 2 * FACTOR


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_case_37_one_update_also_if_each_optimizer_is_stepped_by_a_call_of_its_own(max_norm: float | None) -> None:
    model, plain = plain_net(), plain_net()
    scaler = Counted(growth_interval=3)
    acc, optimizers = Accumulator(model, 2, scaler=scaler), halves(model)
    reference, others = Accumulator(plain, 2), halves(plain)
    for window in range(3):
        terms = [data(0, 2 * window + index) for index in range(2)]
        feed(acc, model, terms)
        feed(reference, plain, terms)
        for optimizer, other in zip(optimizers, others, strict=True):
            assert acc.optimizer_step(optimizer, max_norm=max_norm)
            assert reference.optimizer_step(other, max_norm=max_norm)
            assert acc.grad_norm is None or torch.allclose(acc.grad_norm, cast("Tensor", reference.grad_norm))
        assert scaler.updated == window + 1
        same(parameters(model), parameters(plain))
    assert scaler.get_scale() == 2 * FACTOR


def test_an_update_does_not_wait_twice_for_parameters_that_no_optimizer_takes() -> None:
    model, scaler = plain_net(), Counted()
    acc, (optimizer, _) = Accumulator(model, 2, scaler=scaler), halves(model)
    updated = []
    for window in range(3):
        for index in range(2):
            feed(acc, model, [data(0, 2 * window + index)])
            updated.append(scaler.updated)
        assert acc.optimizer_step(optimizer)
        model.zero_grad()
    acc.close()
    assert updated == [0, 0, 1, 1, 2, 2]  # in the first window it waited until the next block
    assert scaler.updated == 3


def test_an_optimizer_that_comes_late_gets_an_update_of_its_own() -> None:
    model, scaler = plain_net(), Counted(growth_interval=1)
    acc, (often, seldom) = Accumulator(model, 1, scaler=scaler), halves(model)
    feed(acc, model, [data(0, 0)])
    assert acc.optimizer_step(often)
    model.zero_grad()
    before = parameters(model)
    feed(acc, model, [data(0, 1)])
    reference = gradient(model, [data(0, 1)])
    assert acc.optimizer_step(often)
    assert acc.optimizer_step(seldom)  # after the window's update has changed the factor
    assert scaler.updated == 3
    same(parameters(model), {name: value - 0.1 * reference[name] for name, value in before.items()})


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
    """Counts the values that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_reads_one_value_more_than_the_scaler_itself_and_only_at_the_update() -> None:
    model, scaler = plain_net(), Counted()
    acc, optimizer = Accumulator(model, 2, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with HostReads() as seen:
            for index in range(2):
                term = data(0, index)
                with acc.step():
                    acc.backward(loss_of(model, term), weight=torch.tensor(3.0))
            acc.clip_grad_norm_(1.0)
        assert seen.count == 0
        with HostReads() as seen:
            assert acc.optimizer_step(optimizer)
        assert seen.count == 2


# -- infinite gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_case_37_an_infinite_gradient_in_the_second_micro_batch_skips_the_update(
    bad: float, fused: bool, max_norm: float | None
) -> None:
    model, scaler = plain_net(), Counted()
    acc = Accumulator(model, 4, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, taken = parameters(model), []
    for index in range(8):
        with acc.step():
            acc.backward(loss_of(model, data(0, index)) * (bad if index == 1 else 1.0))
        if index == 7:
            reference = gradient(plain_net(), [data(0, i) for i in range(4, 8)])
        taken.append(acc.optimizer_step(optimizer, max_norm=max_norm, schedulers=[scheduler]))
        assert not acc.is_boundary or all(p.grad is None for p in model.parameters())
        if index < 7:
            same(parameters(model), before, 0.0)
    assert taken == [False] * 7 + [True]
    assert (scheduler.last_epoch, acc.updates, scaler.updated) == (1, 2, 2)
    assert scaler.get_scale() == FACTOR / 2
    if max_norm is None:
        same(parameters(model), {name: value - 0.1 * reference[name] for name, value in before.items()}, 1e-9)


@pytest.mark.parametrize("fused", [False, True])
def test_one_optimizers_infinite_gradient_skips_all_that_are_stepped_by_the_same_call(fused: bool) -> None:
    model, scaler = plain_net(), Counted()
    first, last = cast("Any", model)[0], cast("Any", model)[2]
    acc = Accumulator(model, 2, scaler=scaler)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1, fused=fused) for part in (first, last)]
    before = parameters(model)
    feed(acc, model, [data(0, 0)])
    with acc.step():
        acc.backward(spoil(model, data(0, 1)))
    assert bool(torch.isfinite(first.weight.grad).all())
    assert not acc.optimizer_step(*optimizers)
    same(parameters(model), before, 0.0)
    assert scaler.get_scale() == FACTOR / 2


def test_one_optimizers_infinite_gradient_does_not_skip_one_that_is_stepped_by_its_own_call() -> None:
    model, scaler = plain_net(), Counted()
    acc, (first, last) = Accumulator(model, 1, scaler=scaler), halves(model)
    before = parameters(model)
    with acc.step():
        acc.backward(spoil(model, data(0, 1)))
    assert acc.optimizer_step(first)
    assert not acc.optimizer_step(last)
    moved = {name for name, value in parameters(model).items() if not torch.equal(value, before[name])}
    assert moved == {"0.weight", "0.bias"}
    assert (scaler.updated, scaler.get_scale()) == (1, FACTOR / 2)


def test_a_window_of_weight_zero_is_an_update_by_zero_unless_its_gradient_is_infinite() -> None:
    model, scaler = plain_net(), Counted()
    acc, optimizer = Accumulator(model, 2, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(model)
    for index in range(2):
        with acc.step():
            acc.backward(loss_of(model, data(0, index)), weight=torch.tensor(0.0))
    assert acc.optimizer_step(optimizer)
    same(parameters(model), before, 0.0)
    assert scaler.get_scale() == FACTOR
    for index in range(2):
        with acc.step():
            root = (0 * cast("Any", model)[2].bias.sum()).sqrt()  # its derivative is 0 * inf, which no mask reaches
            acc.backward(loss_of(model, data(0, index)) + root, weight=torch.tensor(0.0))
    assert not acc.optimizer_step(optimizer)
    same(parameters(model), before, 0.0)
    assert scaler.get_scale() == FACTOR / 2


# -- float16 ----------------------------------------------------------------------------------------------------------


def half_precision_updates(weight: float | None, windows: int = 3, **options: Any) -> tuple[list[bool], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 64))
    scaler = GradScaler("cpu", **options)
    acc, optimizer = Accumulator(model, 4, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for index in range(4 * windows):
        with acc.step(), torch.autocast("cpu", dtype=torch.float16):
            logits = model(data(0, index, 16).x.float())
            acc.backward(functional.cross_entropy(logits, torch.arange(16)), weight=weight)
        if acc.is_boundary:
            taken.append(acc.optimizer_step(optimizer))
    return taken, scaler.get_scale()


@pytest.mark.parametrize("weight", [None, 1, 16, 4096, 32768])
def test_weights_of_tokens_do_not_overflow_float16_in_any_window(weight: float | None) -> None:
    assert half_precision_updates(weight) == ([True] * 3, 65536.0)


@pytest.mark.parametrize("weight", [None, 3, torch.tensor(512)], ids=repr)
def test_a_float16_loss_is_scaled_in_float32(weight: float | Tensor | None) -> None:
    weights = nn.Parameter(torch.ones((), dtype=torch.float16))
    acc = Accumulator(nn.ParameterList([weights]), 8, scaler=GradScaler("cpu", init_scale=2.0**16))
    for _ in range(8):
        with acc.step():
            acc.backward(weights * 0.5, weight=weight)
    assert weights.grad is not None
    assert weights.grad.item() == 2.0**15  # the factor itself is no float16
    assert acc.loss is not None
    assert acc.loss.item() == 0.5


def test_the_norm_of_float16_gradients_is_no_float16() -> None:
    weight = nn.Parameter(torch.ones(4096, dtype=torch.float16))
    acc = Accumulator(nn.ParameterList([weight]), 1, scaler=GradScaler("cpu", init_scale=2.0**12))
    with acc.step():
        acc.backward(weight.sum())
    assert float(acc.clip_grad_norm_(1.0)) == 64.0  # of 4096 ones; scaled it is 2 ** 18
    assert weight.grad is not None
    assert float(weight.grad[0]) == pytest.approx(64.0, rel=1e-2)  # 1 / 64, times the factor


# -- one scaler, several accumulators ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_hand", "weighted"), list(product([False, True], [False, True])))
def test_another_accumulators_update_in_mid_window_changes_nothing(by_hand: bool, weighted: bool) -> None:
    gen, disc = plain_net(1), plain_net(2)
    scaler = Counted(growth_interval=1)  # each update doubles the factor
    accs = Accumulator(gen, 2, scaler=scaler), Accumulator(disc, 4, scaler=scaler)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (gen, disc)]
    plain, others = [plain_net(1), plain_net(2)], []
    references = Accumulator(plain[0], 2), Accumulator(plain[1], 4)
    others = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for index in range(8):
        term = data(0, index, 1 + index % 3, 1.0 + index % 3)
        for acc, model, reference, other in zip(accs, (gen, disc), references, plain, strict=True):
            feed(acc, model, [term], weighted)
            feed(reference, other, [term], weighted)
        for acc, optimizer, reference, other_optimizer in zip(accs, optimizers, references, others, strict=True):
            if not by_hand:
                acc.optimizer_step(optimizer, max_norm=0.1)
            elif acc.is_boundary:
                acc.clip_grad_norm_(0.1)
                scaler.step(optimizer)
                optimizer.zero_grad()
            reference.optimizer_step(other_optimizer, max_norm=0.1)
        if by_hand and accs[0].is_boundary:
            scaler.update()
    for model, other in zip((gen, disc), plain, strict=True):
        same(parameters(model), parameters(other), 1e-7)
        assert not torch.equal(cast("Any", model)[0].weight, cast("Any", plain_net(1))[0].weight)
    assert scaler.updated == (4 if by_hand else 6)
    assert scaler.get_scale() == FACTOR * 2**scaler.updated


def test_what_the_user_has_unscaled_is_not_unscaled_again_after_another_accumulators_update() -> None:
    gen, disc = plain_net(1), plain_net(2)
    scaler = Counted(growth_interval=1)
    accs = [Accumulator(model, 1, scaler=scaler) for model in (gen, disc)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (gen, disc)]
    for acc, model in zip(accs, (gen, disc), strict=True):
        feed(acc, model, [data(0, 0)])
    scaler.unscale_(optimizers[1])
    assert accs[0].optimizer_step(optimizers[0])
    scaler.step(optimizers[1])
    scaler.update()
    reference, before = gradient(plain_net(2), [data(0, 0)]), parameters(plain_net(2))
    same(parameters(disc), {name: value - 0.1 * reference[name] for name, value in before.items()})
    assert scaler.updated == 2


def test_one_accumulators_infinite_gradient_does_not_skip_the_others_update() -> None:
    gen, disc = plain_net(1), plain_net(2)
    scaler = Counted()
    accs = [Accumulator(model, 1, scaler=scaler) for model in (gen, disc)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (gen, disc)]
    for acc, model, bad in zip(accs, (gen, disc), (INF, 1.0), strict=True):
        with acc.step():
            acc.backward(loss_of(model, data(0, 0)) * bad)
    taken = [acc.optimizer_step(optimizer) for acc, optimizer in zip(accs, optimizers, strict=True)]
    assert taken == [False, True]
    assert scaler.get_scale() == FACTOR / 2
    reference, before = gradient(plain_net(2), [data(0, 0)]), parameters(plain_net(2))
    same(parameters(disc), {name: value - 0.1 * reference[name] for name, value in before.items()})


# -- what the user does himself, and mistakes -------------------------------------------------------------------------


def test_the_user_may_scale_by_himself() -> None:
    model, scaler = plain_net(), Counted()
    acc, optimizer = Accumulator(model, 2, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(model)
    reference = gradient(model, [data(0, 0), data(0, 1)])
    for index in range(2):
        with acc.step():
            scaler.scale(loss_of(model, data(0, index)) / 2).backward()  # type: ignore[no-untyped-call]  # torch's
        assert acc.optimizer_step(optimizer, max_norm=1e9) == acc.is_boundary
    norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in reference.values()]))
    assert float(cast("Tensor", acc.grad_norm)) == pytest.approx(float(norm))
    same(parameters(model), {name: value - 0.1 * reference[name] for name, value in before.items()})
    assert scaler.updated == 1


def test_an_ordinary_step_between_windows_is_torchs_own() -> None:
    model, scaler = plain_net(), Counted(growth_interval=1)
    acc, optimizer = Accumulator(model, 1, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    feed(acc, model, [data(0, 0)])
    assert acc.optimizer_step(optimizer)
    before, reference = parameters(model), gradient(model, [data(0, 1)])
    scaler.scale(loss_of(model, data(0, 1))).backward()  # type: ignore[no-untyped-call]  # torch's
    scaler.step(optimizer)
    scaler.update()
    same(parameters(model), {name: value - 0.1 * reference[name] for name, value in before.items()})


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("fused", [False, True])
def test_unscaling_in_mid_window_is_an_error_that_harms_nothing(call: str, fused: bool) -> None:
    model, scaler = plain_net(), Counted()
    acc = Accumulator(model, 2, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(WindowError, match=r"micro-batch 1 of 2.*is_boundary"):
        getattr(scaler, call)(optimizer)
    feed(acc, model, [data(0, 1)])
    scaler.unscale_(optimizer)
    matches(model, plain_net(), [data(0, 0), data(0, 1)])


def test_unscaling_twice_is_an_error() -> None:
    model, scaler = plain_net(), Counted()
    acc, optimizer = Accumulator(model, 1, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    feed(acc, model, [data(0, 0)])
    scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(WindowError, match=r"SGD.*update\(\)"):
        acc.optimizer_step(optimizer)


def test_an_optimizer_without_any_gradient_is_stepped_like_one_without_a_scaler() -> None:
    model, scaler = plain_net(), Counted()
    idle = nn.Linear(2, 2)
    acc = Accumulator([model, idle], 1, scaler=scaler)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, idle)]
    feed(acc, model, [data(0, 0)])
    assert acc.optimizer_step(*optimizers)
    assert scaler.updated == 1


def test_a_disabled_scaler_is_none() -> None:
    model, scaler = plain_net(), GradScaler("cpu", enabled=False)
    acc = Accumulator(model, 2, scaler=scaler)
    assert type(scaler) is GradScaler
    feed(acc, model, [data(0, 0), data(0, 1)])
    matches(model, plain_net(), [data(0, 0), data(0, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert acc.optimizer_step(optimizer, max_norm=1.0)
    assert scaler.step(optimizer) is None


def test_what_is_no_scaler_or_no_optimizer_is_named() -> None:
    model = plain_net()
    with pytest.raises(TypeError, match=r"scaler must be.*'fp16'"):
        Accumulator(model, 2, scaler=cast("Any", "fp16"))

    class Steps:
        def step(self) -> None: ...
        def zero_grad(self) -> None: ...

    acc = Accumulator(model, 1, scaler=GradScaler("cpu"))
    feed(acc, model, [data(0, 0)])
    with pytest.raises(TypeError, match=r"param_groups.*Steps"):
        acc.optimizer_step(Steps())


def test_copies_and_pickles_of_the_scaler_are_plain_ones() -> None:
    model, scaler = plain_net(), Counted()
    acc, optimizer = Accumulator(model, 1, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    feed(acc, model, [data(0, 0)])
    assert acc.optimizer_step(optimizer)
    scaler.update(FACTOR / 4)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(other) is Counted
        assert other.state_dict() == scaler.state_dict()
        weight = nn.Parameter(torch.ones(2))
        other.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]  # torch's
        other.step(torch.optim.SGD([weight], lr=0.5))
        other.update()
        assert weight.tolist() == [0.5, 0.5]


def test_the_scaler_is_left_as_it_was_found() -> None:
    scaler = Counted()
    first, second = Accumulator(plain_net(), 1, scaler=scaler), Accumulator(plain_net(), 1, scaler=scaler)
    assert isinstance(scaler, Counted)
    first.close()
    assert type(scaler) is not Counted  # the second is still there
    del second
    gc.collect()
    assert type(scaler) is Counted
