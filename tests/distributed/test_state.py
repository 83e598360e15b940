"""Saved between two micro-batches and loaded elsewhere: bit for bit what an uninterrupted run gives, on real ranks."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accumulate import AccumulateError, Accumulator, WindowError
from distributed.arrangements import ARRANGEMENTS, BY_NAME, Arrangement, WithBuffers, ddp
from distributed.battery import LR, clear, learning, microbatch, parts
from support.counting import Collectives
from support.loops import data, feed, grads, loss_of, matches, plain_net, rank
from support.oracle import Term, mean_square
from support.ranks import Pool, on_ranks

STEPS, TOTAL = 3, 10


def local(tensor: Tensor) -> Tensor:
    """This rank's piece."""
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor)).detach()


def pieces(model: Any) -> list[Tensor]:
    """Every weight and buffer that this rank holds."""
    return [local(t) for part in parts(model) for t in (*part.parameters(), *part.buffers())]


class Run:
    """One process's objects around the model of one row, and its loop."""

    def __init__(self, row: Arrangement, weighted: bool) -> None:
        self.row, self.weighted = row, weighted
        self.model = row.build()
        self.params = learning(row, self.model)
        self.optimizer = torch.optim.SGD(self.params, lr=LR, momentum=0.9)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{row.warns or 'nothing to ignore'}")
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
        state = {index: self.optimizer.state[p] for index, p in enumerate(self.params) if p in self.optimizer.state}
        momenta = {index: local(each["momentum_buffer"]).clone() for index, each in state.items()}
        torch.save({"weights": weights, "momenta": momenta, "acc": self.acc.state_dict()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        found = torch.load(io.BytesIO(saved), weights_only=True)
        with torch.no_grad():
            for mine, theirs in zip(pieces(self.model), found["weights"], strict=True):
                mine.copy_(theirs)
            for index, momentum in found["momenta"].items():
                buffer = self.params[index].detach().clone()
                local(buffer).copy_(momentum)
                self.optimizer.state[self.params[index]]["momentum_buffer"] = buffer
        self.acc.load_state_dict(found["acc"])

    def result(self) -> dict[str, Any]:
        acc = self.acc
        sums = [p.grad for part in parts(self.model) for p in part.parameters()]
        return {
            "weights": pieces(self.model),
            "gradients": [None if grad is None else local(grad) for grad in sums],
            "losses": [acc.loss, acc.global_loss()],
            "counters": (acc.micro_steps, acc.updates, acc.position, acc.is_boundary),
        }


def same_bits(there: Any, here: Any) -> bool:
    if isinstance(there, (list, tuple)):
        return len(there) == len(here) and all(map(same_bits, there, here))
    if isinstance(there, Tensor):
        return torch.equal(there, here) and there.dtype == here.dtype
    return bool(there == here)


def resumed(name: str, cuts: list[int]) -> dict[tuple[bool, int], list[str]]:
    """For each cut, what differs in the end from an uninterrupted run."""
    row, found = BY_NAME[name], {}
    for weighted in (False, True):
        whole, saved = Run(row, weighted), {}
        for index in range(TOTAL):
            whole.go_on(index, index + 1)
            saved[index + 1] = whole.save() if index + 1 in cuts else b""
        expected = whole.result() if row.wrapper in RESUMABLE else without_gradients(whole)
        for cut in cuts:
            run = Run(row, weighted)
            run.load(saved[cut])
            assert run.result()["counters"] == (cut, cut // STEPS, cut % STEPS, cut % STEPS == 0)
            run.go_on(cut, TOTAL)
            mine = run.result() if row.wrapper in RESUMABLE else without_gradients(run)
            found[weighted, cut] = [key for key in expected if not same_bits(expected[key], mine[key])]
    return found


def without_gradients(run: Run) -> dict[str, Any]:
    """What can be seen in mid-window where gradients are hidden and weights unsharded."""
    run.acc.reset()
    return {**run.result(), "gradients": None}


RESUMABLE = ("none", "DDP", "several")
"""Rows with these wrappers can be resumed in mid-window."""


@pytest.mark.parametrize(
    "row",
    [r for r in ARRANGEMENTS if r.wrapper in RESUMABLE and not r.counts_hook],  # PowerSGD's own state is not ours
    ids=lambda row: row.name,
)
def test_case_49_resumed_in_mid_window_it_is_bit_equal(row: Arrangement, ranks: Callable[[int], Pool]) -> None:
    cuts = [2, 5, 6] if row.compiled else [1, 2, 3, 5]
    for found in ranks(row.world).run(resumed, row.name, cuts):
        assert found == {(weighted, cut): [] for weighted in (False, True) for cut in cuts}


@pytest.mark.parametrize("row", [r for r in ARRANGEMENTS if r.wrapper not in RESUMABLE], ids=lambda row: row.name)
def test_case_49_resumed_at_a_boundary_it_is_bit_equal(row: Arrangement, ranks: Callable[[int], Pool]) -> None:
    for found in ranks(row.world).run(resumed, row.name, [3, 6]):
        assert found == {(weighted, cut): [] for weighted in (False, True) for cut in (3, 6)}


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp1-full-orig", "fsdp1-no-shard", "fsdp2", "replicate"])
def test_where_sums_are_not_in_grad_a_state_is_refused_in_mid_window(name: str) -> None:
    run = Run(BY_NAME[name], weighted=True)
    run.go_on(0, 4)
    kind = "FullyShardedDataParallel" if name.startswith("fsdp1") else "(FSDPNet|ReplicateNet|FSDP.*)"
    with pytest.raises(
        WindowError, match=rf"cannot be saved here: .*model \({kind}\).*micro-batch 1 of 3. Save .*flush"
    ):
        run.acc.state_dict()
    assert run.acc.flush()
    with pytest.warns(UserWarning, match=r"gradient of the closed window is not saved.*after the update.*=False"):
        state = run.acc.state_dict()
    assert state["gradients"] is None
    assert run.acc.state_dict(gradients=False)["updates"] == 2
    run.optimizer.step()
    assert run.acc.state_dict()["updates"] == 2  # without the warning
    mine = Run(BY_NAME["ddp"], weighted=True)
    mine.go_on(0, 4)
    other = Run(BY_NAME[name], weighted=True)
    with pytest.raises(WindowError, match=r"wrappers is \['DistributedDataParallel at model'\] in the state"):
        other.acc.load_state_dict(mine.acc.state_dict())


# -- DDP --------------------------------------------------------------------------------------------------------------


class OutOfOrder(nn.Module):
    """Layers that run in another order than they are registered in, which DDP's buckets follow once it has seen it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[index](x))
        return x


def last_bits(options: dict[str, Any], cuts: list[int]) -> list[int]:
    """The cuts after which weights and gradients are bit-equal; float32, several buckets, one of them too big."""

    def build() -> tuple[nn.Module, Any, Accumulator]:
        model = ddp(OutOfOrder(), bucket_cap_mb=0.03, **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.5), Accumulator(model, 3)

    def go_on(model: nn.Module, optimizer: Any, acc: Accumulator, first: int, last: int) -> None:
        for index in range(first, last):
            draw = torch.Generator().manual_seed(100 * rank() + index)
            with acc.step():
                acc.backward(model(torch.randn(3, 64, generator=draw)).square().mean())
            acc.optimizer_step(optimizer)

    found = []
    for cut in cuts:
        first, again = build(), build()
        go_on(*first, 0, cut)
        again[0].load_state_dict(first[0].state_dict())
        again[2].load_state_dict(first[2].state_dict())
        for each in (first, again):
            go_on(*each, cut, 7)
        same = same_bits([*first[0].parameters()], [*again[0].parameters()])
        if same and all(torch.equal(grads(first[0])[name], value) for name, value in grads(again[0]).items()):
            found.append(cut)
    return found


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_on_more_than_two_ranks_gradients_add_up_in_the_same_order(
    options: dict[str, Any], ranks: Callable[[int], Pool]
) -> None:
    cuts = [2, 3, 4]
    assert ranks(3).run(last_bits, options, cuts) == [cuts] * 3


@on_ranks(2)
def test_buffers_are_not_broadcast_again_in_mid_window() -> None:
    def build() -> tuple[nn.Module, Accumulator]:
        torch.manual_seed(0)
        model = ddp(WithBuffers().double())
        with pytest.warns(UserWarning, match="BatchNorm"):
            return model, Accumulator(model, 3)

    (model, acc), (other, again) = build(), build()
    feed(acc, model, [data(rank(), 0)])
    other.load_state_dict(model.state_dict())  # each rank's own
    again.load_state_dict(acc.state_dict())
    feed(acc, model, [data(rank(), 1)])
    feed(again, other, [data(rank(), 1)])
    assert same_bits(list(model.buffers()), list(other.buffers()))
    means = [torch.empty(16, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(means, cast("Any", other).module.norm.running_mean)
    assert not torch.equal(*means)


@on_ranks(2)
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_a_ddp_model_that_has_trained_on_can_be_put_back(option: str) -> None:
    model = ddp(plain_net(), **{option: True})
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), i) for i in range(5)])
    state, before = acc.state_dict(), grads(model)
    feed(acc, model, [data(rank(), 5)])
    expected = grads(model)
    model.zero_grad()
    feed(acc, model, [data(rank(), 6)])
    acc.reset()
    acc.load_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in grads(model).items())
    feed(acc, model, [data(rank(), 5)])
    assert all(torch.equal(expected[name], value) for name, value in grads(model).items())


@on_ranks(2)
def test_a_static_graph_keeps_local_sums_in_its_very_first_micro_batch() -> None:
    """Torch has to reduce it; what a rank saves after it is its own all the same."""
    model = ddp(plain_net(), static_graph=True, gradient_as_bucket_view=True)
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 0)])
    state = cast("Any", acc.state_dict())["gradients"]["model"]
    for name, param in plain_gradient(data(rank(), 0)).items():
        assert torch.allclose(state[f"module.{name}"], param / 3, rtol=1e-12)
    feed(acc, model, [data(rank(), i) for i in (1, 2)])
    matches(model, plain_net(), [data(r, i) for r in range(2) for i in range(3)])


def plain_gradient(term: Term) -> dict[str, Tensor]:
    model = plain_net()
    cast("Any", loss_of(model, term)).backward()
    return grads(model)


# -- all ranks, or none -----------------------------------------------------------------------------------------------


def unharmed(acc: Accumulator, model: nn.Module, state: Any, error: type[Exception], says: str) -> None:
    """Loading raises on this rank, changes nothing, and the next window is exact."""
    with pytest.raises(error, match=says):
        acc.load_state_dict(state)
    assert (acc.micro_steps, acc.updates, acc.position, acc.is_boundary) == (0, 0, 0, False)
    assert not grads(model)
    feed(acc, model, [data(rank(), i) for i in range(3)])
    matches(model, plain_net(), [data(r, i) for r in range(2) for i in range(3)])


def state_after(count: int, weights: bool = False) -> dict[str, Any]:
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    for index in range(count):
        feed(acc, model, [data(rank(), index, weight=2.0 + index)], weighted=weights)
        if acc.is_boundary:
            model.zero_grad()
    return acc.state_dict()


def exchanged(state: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, state)
    return every


@on_ranks(2)
def test_the_state_of_another_rank_is_refused_on_all_ranks() -> None:
    state = exchanged(state_after(2))[0]
    model = ddp(plain_net())
    if rank() == 0:
        unharmed(Accumulator(model, 3), model, state, AccumulateError, "rank 1 could not load.*rank is 0 in the state")
    else:
        unharmed(Accumulator(model, 3), model, state, WindowError, "rank is 0 in the state and 1 here.*Each rank loads")


@on_ranks(2)
@pytest.mark.parametrize("bad", [None, {"version": 1}, "no window"], ids=str)
def test_what_one_rank_cannot_load_no_rank_loads(bad: Any) -> None:
    state = (state_after(2), bad)[rank()]
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    if rank() == 0:
        unharmed(
            acc, model, state, AccumulateError, r"rank 1 could not load its state, so none was loaded: \w+Error: state"
        )
    else:
        unharmed(acc, model, state, Exception, "state")


@on_ranks(2)
def test_states_of_different_moments_are_refused() -> None:
    states = [exchanged(state_after(count, weights=True)) for count in (2, 5)]
    model = ddp(plain_net())
    unharmed(Accumulator(model, 3), model, states[rank()][rank()], AccumulateError, "disagree on updates.*has 0,.*1 1")


@on_ranks(2)
def test_states_of_different_scales_are_refused() -> None:
    states = [state_after(3, weights=True), state_after(3)]
    model = ddp(plain_net())
    unharmed(Accumulator(model, 3), model, states[rank()], AccumulateError, "disagree on mean_weight.*3.0.*None")


@on_ranks(2)
def test_at_a_boundary_all_ranks_may_load_the_state_of_one() -> None:
    state = exchanged(state_after(4, weights=True) and state_after(6, weights=True))[0]
    model = ddp(plain_net())
    acc = Accumulator(model, 5)
    acc.load_state_dict(state)
    assert (acc.micro_steps, acc.updates, acc.position, acc.is_boundary) == (6, 2, 0, True)
    assert acc.loss is None  # it was rank 0's own
    assert acc.global_loss() is None
    feed(acc, model, [data(rank(), i, weight=1.0 + i) for i in range(5)], weighted=True)
    matches(model, plain_net(), [data(r, i, weight=1.0 + i) for r in range(2) for i in range(5)])


@on_ranks(4)
def test_under_hsdp_ranks_of_both_dimensions_agree() -> None:
    run = Run(BY_NAME["hsdp"], weighted=True)
    run.go_on(0, 3)
    state: Any = run.acc.state_dict() if rank() != 3 else 5
    again = Run(BY_NAME["hsdp"], weighted=True)
    with pytest.raises((AccumulateError, TypeError), match="state must be what"):
        again.acc.load_state_dict(state)
    assert again.acc.updates == 0


@on_ranks(2)
def test_loading_sends_reports_and_nothing_else_where_buckets_are_as_they_were() -> None:
    state = state_after(2)
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    with Collectives() as seen:
        acc.load_state_dict(state)
    assert not seen.reductions
    with Collectives() as seen:
        acc.state_dict()
    assert not seen.log


# -- batches() --------------------------------------------------------------------------------------------------------


COUNTS = (5, 7)


def batch(index: int, owner: int) -> Term:
    return data(owner, index, n=1 + (index + owner) % 3, weight=float(1 + (3 * index + owner) % 5))


def loop(acc: Accumulator, model: nn.Module, optimizer: Any, first: int, weighted: bool) -> Iterator[None]:
    """Each rank's own number of batches, in windows of three; the last is padded on rank 0."""
    weight = (lambda one: one.weight) if weighted else None
    mine = [batch(index, rank()) for index in range(first, COUNTS[rank()])]
    for each in acc.batches(mine, weight=weight):
        with acc.step():
            acc.backward(loss_of(model, each), weight=each.weight if weighted else None)
            if weighted:
                acc.backward(0.1 * model(each.x).abs().mean())
        acc.optimizer_step(optimizer)
        yield


@on_ranks(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_loop_over_batches_goes_on_with_unequal_ranks(cut: int, weighted: bool) -> None:
    def build() -> tuple[Accumulator, nn.Module, Any]:
        model = ddp(plain_net())
        return Accumulator(model, 3), model, torch.optim.SGD(model.parameters(), lr=0.1)

    whole, first, again = build(), build(), build()
    list(loop(*whole, 0, weighted))
    for _ in itertools.islice(loop(*first, 0, weighted), cut):
        pass
    again[1].load_state_dict(first[1].state_dict())
    again[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    list(loop(*again, cut, weighted))
    assert same_bits([*whole[1].parameters()], [*again[1].parameters()])
    assert whole[0].micro_steps == again[0].micro_steps == COUNTS[rank()]
    assert same_bits(whole[0].global_loss(), again[0].global_loss())


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def first_half(folder: str) -> dict[str, Tensor]:
    """Saves in mid-window, then goes on to the end of the window."""
    model = ddp(plain_net())
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), i, weight=2.0 + i) for i in range(2)], weighted=True)
    file = io.BytesIO()
    torch.save(acc.state_dict(), file)
    save({"model": model.state_dict(), f"accumulator of rank {rank()}": file.getvalue()}, checkpoint_id=folder)
    feed(acc, model, [data(rank(), 2, weight=4.0)], weighted=True)
    return grads(model)


def second_half(folder: str) -> dict[str, Tensor]:
    """Loads in another process group, into new objects, and goes on."""
    model = ddp(plain_net(seed=2))
    acc = Accumulator(model, 3)
    key = f"accumulator of rank {rank()}"
    state: Any = {"model": model.state_dict(), key: b""}
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    acc.load_state_dict(torch.load(io.BytesIO(state[key]), weights_only=True))
    assert (acc.micro_steps, acc.position) == (2, 2)
    feed(acc, model, [data(rank(), 2, weight=4.0)], weighted=True)
    return grads(model)


def test_case_49_through_torch_distributed_checkpoint(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    before, after = (ranks(2).run(half, str(tmp_path / "checkpoint")) for half in (first_half, second_half))
    for there, here in zip(before, after, strict=True):
        assert there
        assert all(torch.equal(there[name], here[name]) for name in there)
