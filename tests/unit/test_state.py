"""``state_dict`` and ``load_state_dict`` on one process: bit-equal wherever it was cut, and nothing else gets in."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accumulate import AccumulateError, Accumulator, WindowError
from support.loops import data, feed, grads, loss_of, matches, plain_net
from support.oracle import Term

STEPS, TOTAL = 4, 13
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def term(index: int) -> Term:
    return data(0, index, n=1 + index % 3, weight=float(1 + (5 * index) % 7))


class Run:
    """One process's objects and its loop."""

    def __init__(self, mode: str, dtype: torch.dtype = torch.float64, steps: Any = STEPS) -> None:
        self.mode, self.dtype = mode, dtype
        self.model = plain_net().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.acc = Accumulator(self.model, steps, scaler=self.scaler if mode == "scaler=" else None)

    def microbatch(self, index: int) -> None:
        x, y, weight = term(index)
        with self.acc.step(*self.boundary(index)):
            loss = (self.model(x.to(self.dtype)) - y.to(self.dtype)).square().mean()
            if self.mode == "scaler":
                run_backward(self.scaler.scale(self.acc.scale(loss)))
            elif self.mode == "the user scales":
                run_backward(loss / STEPS)
            elif self.mode == "weights" and index % 5 == 3:
                self.acc.backward(loss * float("nan"), weight=0)
            elif self.mode == "weights":
                self.acc.backward(loss, weight=weight)
            elif self.mode in ("weights on the device", "scaler="):
                self.acc.backward(loss, weight=torch.tensor(weight))
            else:
                self.acc.backward(loss)

    def boundary(self, index: int) -> tuple[bool, ...]:
        return (index % 5 == 4,) if self.mode == "by hand" else ()

    def update(self) -> None:
        if self.mode == "scaler" and self.acc.is_boundary:
            self.scaler.unscale_(self.optimizer)
            self.acc.clip_grad_norm_(0.1)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        elif self.mode != "scaler":
            self.acc.optimizer_step(self.optimizer, max_norm=0.1, schedulers=[self.scheduler])

    def go_on(self, first: int, last: int) -> None:
        for index in range(first, last):
            self.microbatch(index)
            self.update()

    def save(self) -> bytes:
        file = io.BytesIO()
        named = ("model", "optimizer", "scheduler", "scaler", "acc")
        torch.save({name: getattr(self, name).state_dict() for name in named}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        for name, state in torch.load(io.BytesIO(saved), weights_only=True).items():
            getattr(self, name).load_state_dict(state)

    def result(self) -> list[Any]:
        acc = self.acc
        params = list(self.model.parameters())
        tensors = [*params, *(p.grad for p in params), acc.loss, acc.global_loss(), acc.grad_norm]
        counters = (acc.micro_steps, acc.updates, acc.position, acc.is_boundary, self.scheduler.last_epoch)
        return [*(None if each is None else each.detach().clone() for each in tensors), counters]


def run_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


def same_bits(there: Any, here: Any) -> bool:
    if isinstance(there, list):
        return len(there) == len(here) and all(map(same_bits, there, here))
    if isinstance(there, Tensor) and isinstance(here, Tensor):
        return torch.equal(there, here) and there.dtype == here.dtype
    return bool(there == here)


MODES = ["means", "weights", "weights on the device", "the user scales", "by hand", "scaler", "scaler="]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")
def test_case_49_resumed_anywhere_it_is_bit_equal(mode: str, dtype: torch.dtype) -> None:
    whole = Run(mode, dtype)
    saved = [whole.save()]
    results = [whole.result()]
    for index in range(TOTAL):
        whole.go_on(index, index + 1)
        saved.append(whole.save())
        results.append(whole.result())
    assert whole.acc.updates >= 2
    assert whole.acc.position > 0
    for cut in range(TOTAL + 1):
        run = Run(mode, dtype)
        run.load(saved[cut])
        assert same_bits(results[cut], run.result()), cut
        run.go_on(cut, TOTAL)
        assert same_bits(results[TOTAL], run.result()), cut


def test_a_resumed_window_can_be_saved_and_resumed_again() -> None:
    whole, run = Run("weights"), Run("weights")
    whole.go_on(0, TOTAL)
    for index in range(TOTAL):
        run.go_on(index, index + 1)
        saved, run = run.save(), Run("weights")
        run.load(saved)
    assert same_bits(whole.result(), run.result())


def test_a_window_goes_on_in_the_same_objects_after_reset() -> None:
    run = Run("means")
    run.go_on(0, 6)
    state, expected = copy.deepcopy(run.acc.state_dict()), run.result()
    run.go_on(6, 7)
    run.acc.reset()
    run.acc.load_state_dict(state)
    assert same_bits(expected, run.result())


# -- what is in it ----------------------------------------------------------------------------------------------------


def test_a_state_shares_no_memory_with_what_goes_on() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0, weight=2), data(0, 1, weight=3)], weighted=True)
    state = acc.state_dict()
    before = copy.deepcopy(state)
    feed(acc, model, [data(0, 2, weight=5)], weighted=True)
    assert all(map(same_bits, flat(before), flat(state)))
    acc.reset()
    acc.load_state_dict(state)
    feed(acc, model, [data(0, 2, weight=5)], weighted=True)
    assert all(map(same_bits, flat(before), flat(state)))


def flat(value: Any) -> list[Any]:
    """Every leaf of nested dicts and lists."""
    if isinstance(value, (dict, list)):
        values = value.values() if isinstance(value, dict) else value
        return [leaf for each in values for leaf in flat(each)]
    return [value]


def test_a_state_holds_only_what_a_safe_load_accepts() -> None:
    run = Run("weights on the device")
    run.go_on(0, 6)
    kinds = {type(leaf) for leaf in flat(run.acc.state_dict())}
    assert kinds <= {int, float, bool, str, type(None), Tensor}
    assert Tensor in kinds


def test_at_a_boundary_after_the_update_there_are_no_gradients_in_it() -> None:
    run = Run("means")
    run.go_on(0, 4)
    assert run.acc.state_dict()["gradients"] is None
    assert run.acc.state_dict()["gradients"] == run.acc.state_dict(gradients=False)["gradients"]


def test_parameters_without_a_gradient_and_frozen_ones_stay_so() -> None:
    def build() -> tuple[nn.ModuleDict, Accumulator]:
        parts: dict[str, nn.Module] = {"used": plain_net(), "unused": plain_net(), "frozen": plain_net()}
        model = nn.ModuleDict(parts)
        model["frozen"].requires_grad_(False)
        return model, Accumulator(model, 2)

    model, acc = build()
    feed(acc, model["used"], [data(0, 0)])
    other, again = build()
    other["unused"][0].weight.grad = torch.ones_like(other["unused"][0].weight)  # type: ignore[index]  # a Sequential
    again.load_state_dict(acc.state_dict())
    assert sorted(grads(other)) == sorted(grads(model))
    assert {name.partition(".")[0] for name in grads(other)} == {"used"}
    feed(again, other["used"], [data(0, 1)])
    matches(other["used"], plain_net(), [data(0, 0), data(0, 1)])


def test_sparse_gradients_are_saved_as_such() -> None:
    def build() -> tuple[nn.Embedding, Accumulator]:
        torch.manual_seed(0)
        model = nn.Embedding(9, 4, sparse=True)
        return model, Accumulator(model, 2)

    def one(model: nn.Module, acc: Accumulator, index: int) -> None:
        with acc.step():
            acc.backward(model(torch.tensor([index, 5])).square().mean())

    (model, acc), (other, again) = build(), build()
    one(model, acc, 1)
    file = io.BytesIO()
    torch.save(acc.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    for each, its in ((model, acc), (other, again)):
        one(each, its, 2)
    assert model.weight.grad is not None
    assert other.weight.grad is not None
    assert other.weight.grad.is_sparse
    assert torch.equal(model.weight.grad.to_dense(), other.weight.grad.to_dense())


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="Tensor.grad_dtype came with torch 2.13 or so")
def test_gradients_of_another_dtype_than_their_parameters() -> None:
    def build() -> tuple[nn.Linear, Accumulator]:
        model = nn.Linear(4, 1).to(torch.bfloat16)
        for param in model.parameters():
            param.grad_dtype = torch.float32
        return model, Accumulator(model, 2)

    model, acc = build()
    with acc.step():
        acc.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    other, again = build()
    again.load_state_dict(acc.state_dict())
    assert other.weight.grad is not None
    assert other.weight.grad.dtype == torch.float32
    assert torch.equal(other.weight.grad, model.weight.grad)  # type: ignore[arg-type]  # not None, or the state was wrong
    ordinary = nn.Linear(4, 1).to(torch.bfloat16)
    refused(Accumulator(ordinary, 2), acc.state_dict(), ValueError, "torch.float32 (1, 4)", "torch.bfloat16")


def test_several_models_are_told_apart() -> None:
    def build() -> tuple[list[nn.Module], Accumulator]:
        models = [plain_net(1), plain_net(2)]
        return models, Accumulator(models, 2)

    (models, acc), (others, again) = build(), build()
    for index in range(2):
        with acc.step():
            acc.backward(loss_of(models[0], data(0, index)) + loss_of(models[1], data(1, index)))
        if index == 0:
            again.load_state_dict(acc.state_dict())
    with again.step():
        again.backward(loss_of(others[0], data(0, 1)) + loss_of(others[1], data(1, 1)))
    for model, other in zip(models, others, strict=True):
        assert all(torch.equal(grads(model)[name], grads(other)[name]) for name in grads(model))
    matches(others[1], plain_net(2), [data(1, 0), data(1, 1)])


# -- between the close of a window and its update ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["weights", "scaler="])
def test_a_gradient_whose_update_is_due_is_in_the_state(mode: str) -> None:
    whole, cut, run = Run(mode), Run(mode), Run(mode)
    whole.go_on(0, 8)
    cut.go_on(0, 7)
    cut.microbatch(7)
    assert cut.acc.is_boundary
    run.load(cut.save())
    assert same_bits(cut.result(), run.result())
    with pytest.raises(WindowError, match=r"a new window would add to the gradient that was loaded.*optimizer_step"):
        run.microbatch(8)
    run.update()
    assert same_bits(whole.result(), run.result())
    run.go_on(8, TOTAL)
    whole.go_on(8, TOTAL)
    assert same_bits(whole.result(), run.result())


def test_a_gradient_that_has_been_unscaled_is_not_saved() -> None:
    run = Run("scaler=")
    run.go_on(0, 3)
    run.microbatch(3)
    assert run.acc.state_dict()["gradients"] is not None
    run.scaler.unscale_(run.optimizer)
    with pytest.warns(UserWarning, match=r"not saved: it has been unscaled.*Save after the update"):
        assert run.acc.state_dict()["gradients"] is None


def test_a_gradient_whose_update_is_due_can_be_left_out_or_dropped() -> None:
    model = plain_net()
    acc = Accumulator(model, 1)
    feed(acc, model, [data(0, 0)])
    assert acc.state_dict(gradients=False)["gradients"] is None
    state = acc.state_dict()
    other = plain_net()
    again = Accumulator(other, 1)
    again.load_state_dict(state)
    other.zero_grad()
    feed(again, other, [data(0, 1)])
    matches(other, plain_net(), [data(0, 1)])


class Simple:
    """An optimizer that is not torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def step(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                param.sub_(0.1 * param.grad)


@pytest.mark.parametrize("kind", ["ordinary", "fused", "not torch's"])
@pytest.mark.parametrize("cleared", [False, True])
def test_an_update_that_has_been_taken_is_not_taken_again(cleared: bool, kind: str) -> None:
    run, again = Run("means"), Run("means")
    run.go_on(0, 3)
    run.microbatch(3)
    if kind == "not torch's":
        Simple(run.model).step()
    elif kind == "fused":
        torch.optim.AdamW(run.model.parameters(), fused=True).step()
    else:
        run.optimizer.step()
    if cleared:
        run.optimizer.zero_grad()
    state = run.acc.state_dict()
    assert state["gradients"] is None
    again.load(run.save())
    assert not again.acc.optimizer_step(again.optimizer, schedulers=[again.scheduler])
    assert again.scheduler.last_epoch == 0
    again.go_on(4, 8)
    assert again.scheduler.last_epoch == 1


# -- when it cannot be ------------------------------------------------------------------------------------------------


def refused(acc: Accumulator, state: Any, error: type[Exception], *says: str) -> None:
    """Loading raises that error, and nothing is changed."""
    models = acc._models
    before = (repr(acc), acc.micro_steps, acc.updates, acc.position, acc.is_boundary)
    found = [[None if p.grad is None else p.grad.clone() for p in model.parameters()] for model in models]
    with pytest.raises(error) as caught:
        acc.load_state_dict(state)
    assert all(text in str(caught.value) for text in says), str(caught.value)
    assert before == (repr(acc), acc.micro_steps, acc.updates, acc.position, acc.is_boundary)
    assert same_bits(found, [[p.grad for p in model.parameters()] for model in models])


def mid_window(steps: Any = STEPS, model: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    model = plain_net() if model is None else model
    acc = Accumulator(model, steps, **options)
    feed(acc, model, [data(0, 0, weight=2), data(0, 1, weight=3)], weighted=True)
    return acc.state_dict()


def test_gradients_false_in_mid_window_is_refused() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(
        WindowError, match=r"gradients=False\) would lose.*after micro-batch 1 of 4. Save when is_boundary"
    ):
        acc.state_dict(gradients=False)


def test_inside_a_block_nothing_is_saved_or_loaded() -> None:
    acc = Accumulator(plain_net(), 2)
    state = acc.state_dict()
    with acc.step():
        with pytest.raises(WindowError, match=r"state_dict\(\) inside a step\(\) block"):
            acc.state_dict()
        with pytest.raises(WindowError, match=r"load_state_dict\(\) inside a step\(\) block"):
            acc.load_state_dict(state)


def test_a_broken_window_is_not_saved() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0)])
    with pytest.raises(ZeroDivisionError), acc.step():
        acc.backward(loss_of(model, data(0, 1)))
        raise ZeroDivisionError
    with pytest.raises(WindowError, match=r"of a broken window: an exception left.*reset\(\)"):
        acc.state_dict()
    acc.reset()
    assert acc.state_dict()["open"] is None


def test_a_window_whose_gradients_were_cleared_is_not_saved() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0)])
    model.zero_grad()
    with pytest.raises(WindowError, match="cleared"):
        acc.state_dict()


def test_gradients_cleared_after_loading_are_noticed() -> None:
    model = plain_net()
    acc = Accumulator(model, STEPS)
    acc.load_state_dict(mid_window())
    model.zero_grad()
    with pytest.raises(WindowError, match="cleared"):
        feed(acc, model, [data(0, 2)])


def test_an_open_window_is_not_overwritten() -> None:
    model = plain_net()
    acc = Accumulator(model, STEPS)
    state = acc.state_dict()
    feed(acc, model, [data(0, 0)])
    refused(acc, state, WindowError, "after micro-batch 1 of 4", "reset()")


def test_another_accumulators_window_is_not_overwritten() -> None:
    model = plain_net()
    acc, other = Accumulator(model, STEPS), Accumulator(model, STEPS)
    feed(acc, model, [data(0, 0)])
    refused(other, mid_window(), WindowError, "another Accumulator has a window open")
    feed(acc, model, [data(0, i) for i in range(1, 4)])
    matches(model, plain_net(), [data(0, i) for i in range(4)])


def test_an_optimizer_inside_backward_is_noticed_when_loading() -> None:
    state = mid_window(lambda update: STEPS)
    model = plain_net()
    acc = Accumulator(model, lambda update: STEPS)
    model[0].weight.register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[index]  # a Sequential
    refused(acc, state, AccumulateError, "post-accumulate-grad hook")


def test_a_closed_accumulator_loads_nothing() -> None:
    acc = Accumulator(plain_net(), STEPS)
    acc.close()
    refused(acc, mid_window(), WindowError, "closed")


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)).double()


def frozen() -> nn.Module:
    model = plain_net()
    model[0].weight.requires_grad_(False)  # type: ignore[index]  # a Sequential
    return model


OTHERS: dict[str, tuple[Callable[[], Accumulator], tuple[str, ...]]] = {
    "steps": (lambda: Accumulator(plain_net(), 3), ("steps is 4 in the state and 3 here",)),
    "a callable": (lambda: Accumulator(plain_net(), lambda update: 5), ("steps is 4 in the state and 5 here",)),
    "names": (lambda: Accumulator(nn.ModuleList([plain_net()]), 4), ("model 0.weight", "'missing' here", "4 more")),
    "shapes": (lambda: Accumulator(wider(), 4), ("float64 (16, 8)", "float64 (20, 8)", "model 0.weight")),
    "dtypes": (lambda: Accumulator(plain_net().float(), 4), ("'float64 (16, 8)'", "'float32 (16, 8)'")),
    "frozen": (lambda: Accumulator(frozen(), 4), ("'float64 (16, 8), frozen'",)),
    "a scaler": (
        lambda: Accumulator(plain_net(), 4, scaler=torch.amp.GradScaler("cpu")),
        ("scaler is None in the state and 'GradScaler' here",),
    ),
    "several": (lambda: Accumulator([plain_net()], 4), ("parameters model is", "model[0]")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_partial_gradients_fit_only_where_they_were_made(name: str) -> None:
    build, says = OTHERS[name]
    refused(build(), mid_window(), WindowError, "partial gradients", "after an update fits any", *says)


def test_another_policy_or_rank_is_refused_in_mid_window() -> None:
    for key, value, says in (
        ("policy", "memory", "policy is 'memory' in the state and 'balanced' here"),
        ("wrappers", ["FSDPLinear at model"], "wrappers is ['FSDPLinear at model'] in the state and [] here"),
        ("rank", 1, "rank is 1 in the state and 0 here"),
        ("ranks", 2, "ranks is 2 in the state and 1 here"),
    ):
        state = mid_window()
        (state if key in state else state["fits"])[key] = value
        refused(Accumulator(plain_net(), STEPS), state, WindowError, says)


def test_at_a_boundary_another_accumulator_is_welcome() -> None:
    run = Run("weights")
    run.go_on(0, 8)
    acc = Accumulator(wider(), 3)
    acc.load_state_dict(run.acc.state_dict())
    assert (acc.micro_steps, acc.updates, acc.position, acc.is_boundary, acc.steps) == (8, 2, 0, True, 3)
    assert same_bits(run.acc.loss, acc.loss)


def test_a_callable_is_compared_by_its_value_for_the_open_window() -> None:
    state = mid_window(lambda update: 4)
    model = plain_net()
    acc = Accumulator(model, lambda update: 4 if update == 0 else 2)
    acc.load_state_dict(state)
    feed(acc, model, [data(0, i) for i in range(2, 4)], weighted=True)
    assert acc.is_boundary
    feed(acc, model, [data(0, i) for i in range(2)], weighted=True)
    assert acc.updates == 2


def test_steps_set_for_the_next_window_must_be_set_again() -> None:
    model = plain_net()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(0, 0)])
    acc.steps = 2
    state = acc.state_dict()
    refused(Accumulator(plain_net(), 4), state, WindowError, "steps is 2 in the state and 4 here")
    other = plain_net()
    again = Accumulator(other, 2)
    again.load_state_dict(state)
    feed(again, other, [data(0, i) for i in range(1, 4)])
    assert again.is_boundary
    matches(other, plain_net(), [data(0, i) for i in range(4)])


def test_loaded_weights_and_losses_without_weights_do_not_mix() -> None:
    model = plain_net()
    acc = Accumulator(model, STEPS)
    acc.load_state_dict(mid_window())
    with pytest.raises(WindowError, match="weight"):
        feed(acc, model, [data(0, 2)])


# -- what a file may hold ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forged:
    """A change of a good state, the error's type, and what its message must contain."""

    path: tuple[str, ...]
    value: Any
    error: type[Exception]
    says: tuple[str, ...]

    def apply(self, state: dict[str, Any]) -> dict[str, Any]:
        inner: Any = state
        for key in self.path[:-1]:
            inner = inner[key]
        if self.value is GONE:
            del inner[self.path[-1]]
        else:
            inner[self.path[-1]] = self.value
        return state


GONE = object()
WEIGHT = ("gradients", "model", "0.weight")
FORGED = [
    Forged(("version",), 2, ValueError, ("version 2", "reads version 1")),
    Forged(("version",), GONE, ValueError, ("version None",)),
    Forged(("version",), True, TypeError, ("state['version']", "int", "True")),
    Forged(("surprise",), 1, ValueError, ("state", "unknown 'surprise'")),
    Forged(("updates",), GONE, ValueError, ("state lacks updates",)),
    Forged(("updates",), "3", TypeError, ("state['updates'] must be int, got '3'",)),
    Forged(("updates",), -1, ValueError, ("state['updates']", "-1")),
    Forged(("micro_steps",), 1.0, TypeError, ("state['micro_steps'] must be int, got 1.0",)),
    Forged(("is_boundary",), 1, TypeError, ("state['is_boundary'] must be bool, got 1",)),
    Forged(("is_boundary",), True, ValueError, ("at a boundary, where none is open",)),
    Forged(("mean_weight",), float("nan"), ValueError, ("state['mean_weight']", "nan")),
    Forged(("mean_weight",), torch.ones(2), ValueError, ("state['mean_weight']", "0 dimensions")),
    Forged(("grad_norm",), torch.ones((), dtype=torch.int64), ValueError, ("state['grad_norm']", "real")),
    Forged(("open",), None, ValueError, ("gradients of no window",)),
    Forged(("open",), [1], TypeError, ("state['open'] must be dict or None, got [1]",)),
    Forged(("open", "position"), 0, ValueError, ("state['open']", "micro-batch 0 of 4")),
    Forged(("open", "padded"), 9, ValueError, ("state['open']", "micro-batch 2 of 4")),
    Forged(("open", "scale"), None, TypeError, ("state['open']['scale'] must be float or Tensor, got None",)),
    Forged(("open", "scale"), float("inf"), ValueError, ("state['open']['scale']", "inf")),
    Forged(("open", "count_scale"), 0.0, ValueError, ("state['open']", "scale")),
    Forged(("open", "losses"), torch.ones(()), ValueError, ("state['open']['losses']", "1 dimensions")),
    Forged(("open", "more"), 1, ValueError, ("state['open']", "unknown 'more'")),
    Forged(("open", "weighted"), GONE, ValueError, ("state['open'] lacks weighted",)),
    Forged(("orders",), {"model": [0, "1"]}, TypeError, ("state['orders']['model']", "list of int")),
    Forged(("fits",), None, ValueError, ("only one of",)),
    Forged(("fits", "steps"), GONE, ValueError, ("state['fits'] lacks steps",)),
    Forged(("gradients",), {}, ValueError, ("one dict for each model",)),
    Forged(("gradients", "model"), [1], ValueError, ("one dict for each model",)),
    Forged(("gradients", "other"), {}, ValueError, ("one dict for each model", "other")),
    Forged(("gradients", "model", "9.weight"), torch.ones(1), ValueError, ("'9.weight'", "no parameter")),
    Forged(WEIGHT, 3.0, TypeError, ("'0.weight'", "must be a tensor, got 3.0")),
    Forged(WEIGHT, torch.ones(8, 16).double(), ValueError, ("'0.weight'", "(8, 16)", "(16, 8)")),
    Forged(WEIGHT, torch.ones(16, 8), ValueError, ("'0.weight'", "torch.float32 (16, 8)", "torch.float64")),
]


@pytest.mark.parametrize("forged", FORGED, ids=lambda forged: ".".join(forged.path) + f"={type(forged.value).__name__}")
def test_what_state_dict_did_not_make_is_refused_and_changes_nothing(forged: Forged) -> None:
    acc = Accumulator(plain_net(), STEPS)
    refused(acc, forged.apply(mid_window()), forged.error, *forged.says)
    feed(acc, acc._models[0], [data(0, i) for i in range(STEPS)])
    matches(acc._models[0], plain_net(), [data(0, i) for i in range(STEPS)])


@pytest.mark.parametrize("state", [None, 3, "state", [], torch.ones(2)], ids=repr)
def test_something_else_than_a_state_is_a_type_error(state: Any) -> None:
    refused(Accumulator(plain_net(), STEPS), state, TypeError, "state must be what", type(state).__name__)


# -- batches() --------------------------------------------------------------------------------------------------------


class Loop:
    """A loop over ``batches()`` that can begin anywhere."""

    def __init__(self, mode: str) -> None:
        self.weighted = mode == "two denominators"
        self.last: Any = "carry" if mode == "carry" else "close"
        self.model = plain_net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.acc = Accumulator(self.model, STEPS)

    def run(self, first: int, count: int = 7) -> Iterator[int]:
        """Yields the number of batches done, after each."""
        weight = (lambda one: one.weight) if self.weighted else None
        stream = (term(index) for index in range(first, count))
        for done, each in enumerate(self.acc.batches(stream, weight=weight, last=self.last), start=first + 1):
            with self.acc.step():
                self.acc.backward(loss_of(self.model, each), weight=each.weight if self.weighted else None)
                if self.weighted:
                    self.acc.backward(0.1 * self.model(each.x).abs().mean())
            self.acc.optimizer_step(self.optimizer)
            yield done

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({name: getattr(self, name).state_dict() for name in ("model", "optimizer", "acc")})

    def load(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            getattr(self, name).load_state_dict(each)


@pytest.mark.parametrize("left", ["inside the loop", "by break"])
@pytest.mark.parametrize("mode", ["close", "carry", "two denominators"])
def test_a_loop_over_batches_goes_on_where_it_was_cut(mode: str, left: str) -> None:
    whole = Loop(mode)
    assert list(whole.run(0)) == [1, 2, 3, 4, 5, 6, 7]
    for cut in range(1, 8):
        first, again = Loop(mode), Loop(mode)
        for done in first.run(0):
            if done == cut:
                if left == "inside the loop":
                    state = first.state()
                break
        again.load(state if left == "inside the loop" else first.state())
        list(again.run(cut))
        assert all(map(torch.equal, whole.model.parameters(), again.model.parameters())), cut
        assert (again.acc.micro_steps, again.acc.updates) == (whole.acc.micro_steps, whole.acc.updates)
        assert same_bits(whole.acc.loss, again.acc.loss)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_window_that_goes_on_with_other_data_than_planned_is_still_exact(ahead: bool, weighted: bool) -> None:
    """It was counted as terms 0 to 2; what comes after loading is one term, and another one."""
    weight = (lambda one: one.weight) if weighted else None
    model = plain_net()
    acc = Accumulator(model, STEPS)
    loop = acc.batches([term(0), term(1), term(2)], weight=weight)
    one = next(loop)
    with acc.step():
        acc.backward(loss_of(model, one), weight=one.weight if weighted else None)
    other = plain_net()
    again = Accumulator(other, STEPS)
    again.load_state_dict(acc.state_dict())
    rest: Any = [term(5)]
    for each in again.batches(rest, weight=weight) if ahead else rest:
        with again.step():
            again.backward(loss_of(other, each), weight=each.weight if weighted else None)
    assert again.flush() != ahead
    expected = [term(0), term(5)] if weighted else [t._replace(weight=1.0) for t in (term(0), term(5))]
    matches(other, plain_net(), expected)


def test_loading_inside_a_loop_over_batches_is_refused() -> None:
    acc = Accumulator(plain_net(), STEPS)
    state = acc.state_dict()
    for _ in itertools.islice(acc.batches([term(0)]), 1):
        refused(acc, state, WindowError, "inside a batches() loop")
