"""``check``: one model for each cause, combinations that must not confuse it, and a user's model left unharmed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from accumulate import UnsupportedWrapperError, check
from accumulate.checking.randomness import Constants
from accumulate.checking.report import Report

IGNORED = -100
Loss = Callable[..., Any]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def net(*middle: nn.Module) -> nn.Module:
    """A small model of six inputs and five outputs, equal each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Linear(16, 5))


def samples(rows: int = 24) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(rows, 6, generator=draw), torch.randn(rows, 5, generator=draw)


def classes(*ignored: int) -> tuple[Tensor, Tensor]:
    """24 samples with classes, of which some are ignored."""
    draw = torch.Generator().manual_seed(3)
    targets = torch.randint(5, (24,), generator=draw)
    targets[list(ignored)] = IGNORED
    return samples()[0], targets


RAGGED = (1, 2, 3, 4, 5, 6, 7, 13, 14, 20)  # in micro-batches of six rows 1, 4, 4 and 5 are left


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def weighted(loss: Loss) -> Loss:
    """That loss with its number of rows as weight."""
    return lambda model, x, y: (loss(model, x, y), len(x))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, ignore_index=IGNORED)


def by_tokens(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(model, x, y), (y != IGNORED).sum()


def two_terms(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over tokens and a mean over rows, weighted by tokens."""
    return cross_entropy(model, x, y) + model(x).square().mean(), (y != IGNORED).sum()


def three_terms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    terms = [two_terms(model, x, y)[0], model(x).abs().mean(), *(p.square().sum() for p in model.parameters())]
    return sum(terms, torch.zeros(()))


def masked_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    live = (y != IGNORED).to(x.dtype)
    return (F.cross_entropy(model(x), y.clamp(min=0), reduction="none") * live).sum() / live.sum()


def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y, reduction="sum")


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """InfoNCE: the other rows of the batch are the negatives."""
    logits = F.normalize(model(x)) @ F.normalize(y).T / 0.1
    return F.cross_entropy(logits, torch.arange(len(x)))


def inner(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """For models that compute their own loss."""
    loss = model(x, y)
    assert isinstance(loss, Tensor)
    return loss


class Centred(nn.Module):
    """A layer that nobody knows, which mixes rows as BatchNorm does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class TimeFirst(nn.Module):
    """Has eight steps of time in its first dimension, and rows in the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x * torch.arange(1.0, 9.0)[:, None, None])
        assert isinstance(out, Tensor)
        return out.mean(0)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * torch.empty_like(x).uniform_(1, 2)


class PythonNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class NativeDropout(nn.Module):
    """Dropout by the operation that CUDA uses."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.4, True)[0]


class Running(nn.Module):
    """Divides its loss by a running mean of losses, with or without the one at hand."""

    scale: Tensor

    def __init__(self, *, with_this: bool) -> None:
        super().__init__()
        self.net, self.with_this = net(), with_this
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = square(self.net, x, y)
        before = self.scale.clone()
        self.scale.mul_(0.5).add_(loss.detach() * 0.5)
        return loss / (self.scale.clone() if self.with_this else before)


class InFloat32(nn.Module):
    """A model that computes in float32 whatever it is cast to, as many norms and softmaxes do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.inner.weight.float(), self.inner.bias.float()).to(x.dtype)


class OnlyFloat32(nn.Module):
    """A model that does not run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x.float())
        assert isinstance(out, Tensor)
        return out


def running_outside() -> Loss:
    """A loss that keeps its normaliser to itself."""
    state = [1.0]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = square(model, x, y)
        state[0] = 0.9 * state[0] + 0.1 * float(loss.detach())
        return loss / state[0]

    return loss_fn


def changing_target() -> Loss:
    calls = [0]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return square(model, x, y + calls[0])

    return loss_fn


@dataclass(frozen=True)
class Case:
    """A model, loss and batch, what the check must say, and the ratio if it is known beforehand."""

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    batch: tuple[Tensor, ...]
    cause: str | None
    ratio: float | None = None
    says: str = ""
    steps: int = 4


EVEN, UNEVEN = samples(), samples(22)
LARGEST = torch.stack([part.abs().max() for part in EVEN[1].tensor_split(4)])
DROPOUT = "dropout or other random numbers"


def spectral() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 5))


def transformer() -> nn.Module:
    torch.manual_seed(1)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)


CASES = [
    Case("fine", net, square, EVEN, None, 1.0, "the same gradient"),
    Case("fine with rows as weight", net, weighted(square), UNEVEN, None, 1.0),
    Case("fine with tokens as weight", net, by_tokens, classes(*RAGGED), None, 1.0),
    Case("fine with a micro-batch of weight 0", net, by_tokens, classes(0, 1, 2, 3, 4, 5, 9), None, 1.0),
    Case("fine with a term of weight 1/4", net, lambda m, x, y: square(m, x, y) + m(x).square().mean() / 4, EVEN, None),
    Case("fine with weight decay", net, lambda m, x, y: square(m, x, y) + m[0].weight.square().sum(), EVEN, None, 1.0),
    Case("fine with BatchNorm in eval mode", lambda: net(nn.BatchNorm1d(16)).eval(), square, EVEN, None, 1.0),
    Case("fine in one row each", net, square, samples(4), None, 1.0),
    Case("divided by steps", net, lambda m, x, y: square(m, x, y) / 4, EVEN, "divided twice", 0.25, "by 4"),
    Case("times 1/steps", net, lambda m, x, y: 0.2 * square(m, x, y), samples(20), "divided twice", 0.2, "by 5", 5),
    Case("divided in place", net, lambda m, x, y: square(m, x, y).div_(4), EVEN, "divided twice", 0.25),
    Case("divided, weighted", net, lambda m, x, y: (square(m, x, y) / 4, len(x)), UNEVEN, "divided twice", 0.25),
    Case("divided by a tensor", net, lambda m, x, y: square(m, x, y) / torch.tensor(4.0), EVEN, "divided twice", 0.25),
    Case("divided by the window", net, lambda m, x, y: total(m, x, y) / 120, EVEN, "divided twice", 0.25, "by 120"),
    Case("divided by rows, of which a micro-batch has as many as steps", net,
         lambda m, x, y: (total(m, x, y) / len(x), len(x)), samples(16), None, 1.0),
    Case("divided by rows, of which the whole has as many as steps", net,
         lambda m, x, y: (total(m, x, y) / len(x), len(x)), samples(4), None, 1.0),
    Case("multiplied by steps", net, lambda m, x, y: square(m, x, y) * 4, EVEN, "not divided", 4.0),
    Case("a sum", net, total, EVEN, "sum-type loss", 0.25, "add up"),
    Case("a sum over uneven rows", net, total, UNEVEN, "sum-type loss", 0.25),
    Case("a sum with a weight", net, weighted(total), EVEN, "sum-type loss", 0.25, 'reduction="sum"'),
    Case("half a sum", net, lambda m, x, y: 0.5 * total(m, x, y), EVEN, "sum-type loss", 0.25),
    Case("uneven rows", net, square, UNEVEN, "mean of means", says="27.27, 27.27, 22.73, 22.73 %"),
    Case("uneven tokens", net, cross_entropy, classes(*RAGGED), "mean of means", says="7.14, 28.57, 28.57, 35.71 %"),
    Case("rows instead of tokens", net, weighted(cross_entropy), classes(*RAGGED), "mean of means", says="7.14, 28.57"),
    Case("terms over tokens and over rows", net, two_terms, classes(*RAGGED), "mean of means", says="term to term"),
    Case("three terms", net, three_terms, classes(*RAGGED), "mean of means", says="term to term"),
    Case("terms of which one is contrastive", net,
         lambda m, x, y: cross_entropy(m, x, y) + contrastive(m, x, x[:, :5]), classes(*RAGGED), "couples the batch"),
    Case("a mask by hand", net, masked_by_hand, classes(*RAGGED), "mean of means", says="7.14, 28.57, 28.57, 35.71 %"),
    Case("one parameter", lambda: nn.Linear(1, 1, bias=False), lambda m, x: m(x[:, :1]).mean(), UNEVEN[:1],
         "mean of means"),
    Case("nothing counts in a micro-batch", net, cross_entropy, classes(0, 1, 2, 3, 4, 5), "non-finite micro-batch"),
    Case("NaN in the derivative", net, lambda m, x, y: (masked_by_hand(m, x, y), (y != IGNORED).sum()),
         classes(0, 1, 2, 3, 4, 5), "non-finite micro-batch", says="clamp(min=1)"),
    Case("BatchNorm", lambda: net(nn.BatchNorm1d(16)), square, EVEN, "BatchNorm", says="1 (BatchNorm1d)"),
    Case("BatchNorm without statistics", lambda: net(nn.BatchNorm1d(16, track_running_stats=False)).eval(), square,
         EVEN, "BatchNorm"),
    Case("a layer that mixes rows", lambda: net(Centred()), square, EVEN, "couples the batch", says="1 (Centred)"),
    Case("contrastive", net, contrastive, EVEN, "couples the batch", says="no layer was seen"),
    Case("rows in the second dimension", TimeFirst, contrastive, samples(8), "couples the batch",
         says="no layer was seen"),
    Case("contrastive with a weight", net, weighted(contrastive), UNEVEN, "couples the batch"),
    Case("rows weighted by their place", net,
         lambda m, x, y: ((m(x) - y).square().mean(1) * torch.arange(1.0, len(x) + 1)).mean(), EVEN,
         "couples the batch"),
    Case("contrastive with few parameters", lambda: nn.Linear(1, 1, bias=False),
         lambda m, x: F.cross_entropy(m(x[:, :1]) @ x[:, :1].T, torch.arange(len(x))), EVEN[:1], "unknown"),
    Case("dropout", lambda: net(nn.Dropout(0.3)), square, EVEN, None, 1.0, DROPOUT),
    Case("CUDA's dropout", lambda: net(NativeDropout()), square, EVEN, None, 1.0, DROPOUT),
    Case("dropout in attention", transformer, lambda m, x: m(x).square().mean() + m(x).mean(),
         (torch.randn(12, 7, 16, generator=torch.Generator().manual_seed(4)),), None, 1.0, DROPOUT),
    Case("noise", lambda: net(Noise()), square, EVEN, None, 1.0, DROPOUT),
    Case("noise of Python", lambda: net(PythonNoise()), square, EVEN, "randomness"),
    Case("divided by the targets' maximum", net, lambda m, x, y: square(m, x, y) / y.abs().max(), EVEN,
         "data-dependent scale", says=f"here {LARGEST.max() / LARGEST[0]:.3g}, "),
    Case("divided by the outputs' maximum", net, lambda m, x, y: square(m, x, y) / m(x).abs().max(), EVEN,
         "data-dependent scale"),
    Case("errors divided by the outputs' maximum", net,
         lambda m, x, y: (((out := m(x)) - y).square() / out.abs().max()).mean(), EVEN, "data-dependent scale"),
    Case("divided by the number of rows again", net, lambda m, x, y: square(m, x, y) / len(x), EVEN,
         "data-dependent scale", 4.0, "0.5 times"),
    Case("divided by a running mean", lambda: Running(with_this=True), inner, EVEN, "data-dependent scale",
         says="changes scale"),
    Case("divided by an earlier running mean", lambda: Running(with_this=False), inner, EVEN, "data-dependent scale",
         says="changes scale"),
    Case("state that is no scale", spectral, square, EVEN, "state between micro-batches", says="weight.0._u"),
    Case("bfloat16", lambda: net().bfloat16(), square, tuple(t.bfloat16() for t in EVEN), None, 1.0),
    Case("float32 inside", InFloat32, lambda m, x: m(x).float().square().mean(), samples(2000)[:1], None, 1.0),
    Case("only float32", OnlyFloat32, square, EVEN, None, 1.0, "float64 does not run"),
    Case("complex", lambda: nn.Linear(6, 5, dtype=torch.complex64), lambda m, x: m(x + 0j).abs().mean(), EVEN[:1],
         None, 1.0),
    Case("sparse", lambda: nn.Embedding(5, 4, sparse=True), lambda m, y: m(y).square().mean(), classes()[1:], None,
         1.0),
    # -- two things at once
    Case("a micro-batch dropped and tokens", net,
         lambda m, x, y: (masked_by_hand(m, x, y), int((y != IGNORED).sum()) ** 2),
         classes(0, 1, 2, 3, 4, 5, 6, 13, 14), "mean of means", says="0, 33.33, 26.67, 40 %"),
    Case("dropout and BatchNorm", lambda: net(nn.Dropout(0.3), nn.BatchNorm1d(16)), square, EVEN, "BatchNorm",
         says=DROPOUT),
    Case("dropout and tokens", lambda: net(nn.Dropout(0.3)), cross_entropy, classes(*RAGGED), "mean of means",
         says="7.14, 28.57, 28.57, 35.71 %"),
    Case("dropout and divided", lambda: net(nn.Dropout(0.3)), lambda m, x, y: square(m, x, y) / 4, EVEN,
         "divided twice", 0.25),
    Case("BatchNorm and tokens", lambda: net(nn.BatchNorm1d(16)), cross_entropy, classes(*RAGGED),
         "BatchNorm, mean of means"),
    Case("BatchNorm and contrastive", lambda: net(nn.BatchNorm1d(16)), contrastive, EVEN,
         "BatchNorm, couples the batch"),
    Case("BatchNorm and another layer", lambda: net(nn.BatchNorm1d(16), Centred()), square, EVEN,
         "BatchNorm, couples the batch", says="2 (Centred)"),
    Case("divided and tokens", net, lambda m, x, y: cross_entropy(m, x, y) / 4, classes(*RAGGED),
         "divided twice, mean of means"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_is_told(case: Case) -> None:
    report = check(case.model(), case.loss, case.batch, case.steps)
    assert report.cause == case.cause, str(report)
    assert report.ok is (case.cause is None)
    assert [finding.cause for finding in report.findings] == (case.cause.split(", ") if case.cause else [])
    assert report.errors
    assert (max(report.errors.values()) < 1e-5) is report.ok
    if case.ratio is not None:
        assert report.ratio == pytest.approx(case.ratio, rel=1e-5)
    assert case.says in str(report)


def test_case_11_dividing_by_hand_as_well_is_reported_as_divided_twice() -> None:
    for steps in (2, 3, 8):
        report = check(net(), lambda model, x, y: square(model, x, y) / steps, EVEN, steps)  # noqa: B023 - called at once
        assert (report.ok, report.cause) == (False, "divided twice")
        assert report.ratio == pytest.approx(1 / steps)
        assert report.errors == pytest.approx(dict.fromkeys(report.errors, 1 - 1 / steps))
        assert "divided twice" in str(report)


def test_a_factor_that_is_not_steps_belongs_to_the_loss() -> None:
    assert check(net(), lambda model, x, y: square(model, x, y) / 3, EVEN, 4).ok


def test_the_errors_and_the_ratio_are_those_of_the_gradients() -> None:
    x, y = (t.double() for t in UNEVEN)
    whole, window = net().double(), net().double()
    square(whole, x, y).backward()  # type: ignore[no-untyped-call]  # torch's
    for rows in (slice(0, 6), slice(6, 12), slice(12, 17), slice(17, 22)):
        (square(window, x[rows], y[rows]) / 4).backward()  # type: ignore[no-untyped-call]  # torch's
    right = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in window.named_parameters() if p.grad is not None}
    report = check(net(), square, UNEVEN)
    expected = {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in right.items()}
    assert report.errors == pytest.approx(expected)
    flat, reference = (torch.cat([g[n].flatten() for n in right]) for g in (ours, right))
    assert report.ratio == pytest.approx(float(flat @ reference / (reference @ reference)))


def test_a_gradient_that_must_be_zero_is_measured_against_the_others() -> None:
    report = check(net(Centred()), square, EVEN)
    assert report.errors["0.bias"] < 1e-10  # of which the layer takes the mean away: all rounding
    assert report.errors["0.weight"] > 1e-3


def test_low_precision_is_what_only_accumulation_loses() -> None:
    rows = torch.ones(68, 1)
    rows[0] = 512
    lost = check(nn.Linear(1, 1, bias=False).bfloat16(), lambda model, x: model(x).mean(), (rows.bfloat16(),), 68)
    assert (lost.ok, lost.cause, lost.precision) == (False, "low precision", "bfloat16")
    assert lost.ratio < 0.95
    assert "In float64 it is exact" in str(lost)
    exact = check(nn.Linear(1, 1, bias=False), lambda model, x: model(x).mean(), (rows,), 68)
    assert (exact.ok, exact.precision) == (True, "float64")


def test_a_dtype_that_does_not_run_natively_is_noted() -> None:
    class NotInBfloat16(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.bfloat16:
                raise RuntimeError("no kernel for this")
            return super().forward(x)

    report = check(NotInBfloat16(6, 5).bfloat16(), square, tuple(t.bfloat16() for t in EVEN))
    assert report.ok
    assert "not judged in torch.bfloat16" in str(report)
    assert "no kernel for this" in str(report)


def test_a_normaliser_that_the_loss_keeps_to_itself_is_a_scale() -> None:
    report = check(net(), running_outside(), EVEN)
    assert report.cause == "data-dependent scale"
    assert "when run again" in str(report)


def test_a_loss_that_is_another_one_each_time_cannot_be_judged() -> None:
    report = check(net(), changing_target(), EVEN)
    assert report.cause == "not repeatable"


def test_a_compiled_model_is_checked_without_compiling_it() -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("it was compiled")

    model = torch.compile(net(), backend=refuse)
    report = check(model, lambda m, x, y: square(m, x, y) / 4, EVEN)  # type: ignore[arg-type]  # torch.compile is untyped
    assert report.cause == "divided twice"
    assert sorted(report.errors) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_numpys_random_numbers_are_seeded_and_kept() -> None:
    numpy = pytest.importorskip("numpy")

    class NumpyNoise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(numpy.random.rand())

    numpy.random.seed(5)
    expected = numpy.random.RandomState(5).rand()
    assert check(net(NumpyNoise()), square, EVEN).cause == "randomness"
    assert numpy.random.rand() == expected


# -- what is left alone


def test_the_users_model_and_random_numbers_are_unharmed() -> None:
    model = net(nn.BatchNorm1d(16), nn.Dropout(0.5))
    square(model, *EVEN).backward()  # type: ignore[no-untyped-call]  # torch's
    model[1].eval()  # type: ignore[index]  # a Sequential
    before = copy.deepcopy(model.state_dict())
    grads = [(p, p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    assert len(grads) == 6
    modes = [m.training for m in model.modules()]
    batch = tuple(t.clone() for t in EVEN)

    def greedy(copied: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)  # a loss that changes its batch
        with torch.no_grad():
            model.train()
            model(EVEN[0])  # and that runs the user's own model
        return square(copied, x, y)

    torch.manual_seed(7)
    random.seed(7)
    drawn = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    assert check(model, greedy, batch).ok
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is grad and torch.equal(grad, value) for p, grad, value in grads)
    assert all(torch.equal(one, other) for one, other in zip(batch, EVEN, strict=True))


def test_it_works_without_gradients_switched_on() -> None:
    with torch.no_grad():
        assert check(net(), square, EVEN).ok
    with torch.inference_mode():
        assert check(net(), square, tuple(t.clone() for t in EVEN)).ok


def test_inputs_that_require_grad_still_do() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum(1).mean()

    assert check(net(), penalty, (EVEN[0].clone().requires_grad_(),)).ok


# -- random numbers as constants


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
    """The operations that reach it, with their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.seen: list[tuple[str, list[object]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append((func.__name__, [arg for arg in args if not isinstance(arg, Tensor)]))
        return func(*args, **(kwargs or {}))


def test_attention_kernels_of_gpus_are_called_without_dropout() -> None:
    q = torch.empty(1, 2, 4, 8, device="meta", dtype=torch.float16)
    with Recorder() as recorder, Constants():
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.3, True)
    assert recorder.seen == [("_scaled_dot_product_flash_attention.default", [0.0, True])]


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: torch.rand(2), 0.5),
        (lambda: torch.randn(2), 0.5),
        (lambda: torch.empty(2).uniform_(-3, -1), -2.0),
        (lambda: torch.empty(2).uniform_(-1), 0.0),
        (lambda: torch.bernoulli(torch.full((2,), 0.1)), 1.0),
        (lambda: torch.randint(2, 8, (2,)), 5),
        (lambda: torch.randint(9, (2,)), 4),
        (lambda: torch.empty(2, dtype=torch.int64).random_(4, 10), 7),
    ],
)
def test_a_draw_becomes_a_number_that_could_have_been_drawn(draw: Callable[[], Tensor], expected: float) -> None:
    with Constants():
        assert draw().tolist() == [expected, expected]


# -- what cannot be checked


@dataclass(frozen=True)
class Bad:
    """One mistake: the arguments, the error's type, and what its message must contain."""

    name: str
    arguments: Callable[[], tuple[Any, ...]]
    error: type[Exception]
    says: tuple[str, ...]


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def of_another(other: nn.Module) -> tuple[Any, ...]:
    return other, lambda model, x, y: square(other, x, y), EVEN


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        raise RuntimeError("it holds a lock")


BAD = [
    Bad("no module", lambda: (3, square, EVEN), TypeError, ("nn.Module", "3")),
    Bad("no function", lambda: (net(), 3, EVEN), TypeError, ("loss_fn", "3")),
    Bad("a tensor as batch", lambda: (net(), square, EVEN[0]), TypeError, ("batch", "Tensor")),
    Bad("a dict as batch", lambda: (net(), square, {"x": EVEN[0]}), TypeError, ("batch", "dict", "values")),
    Bad("a number in the batch", lambda: (net(), square, (EVEN[0], 3)), TypeError, ("batch", "Tensor, int", "loss_fn")),
    Bad("an empty batch", lambda: (net(), square, ()), ValueError, ("batch", "at least one")),
    Bad("a scalar in the batch", lambda: (net(), square, (EVEN[0], torch.ones(()))), ValueError, ("dimensions",)),
    Bad("unequal rows", lambda: (net(), square, (EVEN[0], UNEVEN[1])), ValueError, ("(24, 6)", "(22, 5)", "first")),
    Bad("too few rows", lambda: (net(), square, samples(3)), ValueError, ("3 samples", "4 micro-batches")),
    Bad("steps 1", lambda: (net(), square, EVEN, 1), ValueError, ("steps", "at least 2", "got 1")),
    Bad("steps 0", lambda: (net(), square, EVEN, 0), ValueError, ("steps", "got 0")),
    Bad("steps 1.5", lambda: (net(), square, EVEN, 1.5), TypeError, ("steps", "1.5")),
    Bad("nothing to train", lambda: (frozen(), square, EVEN), ValueError, ("requires_grad",)),
    Bad("a vector as loss", lambda: (net(), lambda m, x, y: m(x).sum(1), EVEN), ValueError, ("scalar", "(24,)")),
    Bad("a number as loss", lambda: (net(), lambda m, x, y: 0.5, EVEN), TypeError, ("loss", "0.5")),
    Bad("a detached loss", lambda: (net(), lambda m, x, y: square(m, x, y).detach(), EVEN), ValueError, ("detach",)),
    Bad("a triple as loss", lambda: (net(), lambda m, x, y: (square(m, x, y), 1, 2), EVEN), TypeError, ("tuple of 3",)),
    Bad("a negative weight", lambda: (net(), lambda m, x, y: (square(m, x, y), -1), EVEN), ValueError, ("-1",)),
    Bad("NaN", lambda: (net(), lambda m, x, y: square(m, x, y) * float("nan"), EVEN), ValueError, ("loss nan",)),
    Bad("zero", lambda: (net(), lambda m, x, y: square(m, x, y) * 0, EVEN), ValueError, ("zero",)),
    Bad("another model", lambda: of_another(net()), ValueError, ("loss_fn", "first argument")),
    Bad("no copy", lambda: (Uncopyable(6, 5), square, EVEN), ValueError, ("deepcopy", "it holds a lock")),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_what_cannot_be_checked_is_refused_with_its_value(bad: Bad) -> None:
    arguments = bad.arguments()
    with pytest.raises(bad.error) as caught:
        check(*arguments)
    assert [text for text in bad.says if text not in str(caught.value)] == [], str(caught.value)
    if isinstance(arguments[0], nn.Module):
        assert all(p.grad is None for p in arguments[0].parameters())


def test_an_error_of_the_users_loss_is_not_hidden() -> None:
    def broken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        check(net(), broken, EVEN)


def test_a_wrapped_model_is_refused_with_advice(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(net())
        with pytest.raises(UnsupportedWrapperError, match=r"DistributedDataParallel.*its \.module"):
            check(model, square, EVEN)
        assert not model._forward_hooks
        assert check(model.module, square, EVEN).ok
    finally:
        dist.destroy_process_group()


# -- the report


def test_the_worst_parameters_are_named_first() -> None:
    report = check(net(nn.BatchNorm1d(16)), square, EVEN)
    worst = sorted(report.errors, key=lambda name: -report.errors[name])[:5]
    shown = [line.split()[0] for line in str(report).splitlines() if line.startswith("  ") and "e-" in line]
    assert shown == worst
    assert "the worst 5 of 6" in str(report)


def test_numbers_that_are_not_finite_are_null_in_the_document() -> None:
    report = Report(ok=False, cause="x", ratio=float("nan"), errors={"a": float("inf"), "b": 0.5}, steps=4, rows=8,
                    precision="float64")  # fmt: skip
    document = report.document()
    assert document["ratio"] is None
    assert document["errors"] == {"a": None, "b": 0.5}
