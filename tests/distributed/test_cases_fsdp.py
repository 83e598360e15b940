"""Cases from users of other training stacks: FSDP1 and fully_shard on two ranks."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from accumulate import AccumulateError, Accumulator, UnsupportedWrapperError, WindowError, no_sync
from distributed.arrangements import BY_NAME, Net, fsdp2
from support.counting import Collectives
from support.loops import data, equal_on_ranks, everyone, feed, grads, loss_of, matches, plain_net, rank
from support.oracle import Term, gradient, same
from support.ranks import on_ranks


def square_and_absolute(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() + (output - target).abs().mean()


def run_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate Tensor.backward


def sharded(seed: int = 1) -> nn.Module:
    """``plain_net`` with ``fully_shard`` on its layers and on itself."""
    from torch.distributed.fsdp import fully_shard

    model = cast("nn.Sequential", plain_net(seed))
    fully_shard(model[0])
    fully_shard(model[2])
    return cast("nn.Module", fully_shard(model))


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-children", "fsdp1-full", "fsdp1-grad-op-orig", "fsdp1-no-shard"])
def test_case_10_weight_zero_on_one_rank_then_on_both(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    acc = Accumulator(model, 2)
    plans = [((3, 3), (0, 0)), ((0, 0), (0, 0)), ((1, 2), (0, 5))]
    for weights in plans:
        for index, weight in enumerate(weights[rank()]):
            with acc.step():
                acc.backward(loss_of(model, data(rank(), index)) * (1 if weight else float("nan")), weight=weight)
        assert acc.is_boundary
        terms = [Term(*data(r, i)[:2], float(w)) for r in range(2) for i, w in enumerate(weights[r]) if w]
        found = row.gradients(model)
        if terms:
            same(found, gradient(row.seed(), terms))
        else:
            assert found
            assert all(bool((value == 0).all()) for value in found.values())
        model.zero_grad()


@on_ranks(2)
def test_case_13_two_forwards_then_two_backwards_and_backward_in_the_next_block() -> None:
    model = sharded()
    acc = Accumulator(model, 2)
    with acc.step():
        acc.backward(loss_of(model, data(rank(), 0)))
        late = loss_of(model, data(rank(), 1))
    with acc.step():
        acc.backward(late)
    matches(model, plain_net(), everyone(range(2)))
    model.zero_grad()
    feed(acc, model, [data(rank(), 0)])
    with acc.step():
        losses = [loss_of(model, data(rank(), index)) for index in (1, 2)]
        for loss in losses:
            acc.backward(loss)
    reference = gradient(plain_net(), everyone(range(3)))
    same(grads(model), {name: 1.5 * value for name, value in reference.items()})
    equal_on_ranks(grads(model))


@on_ranks(2)
def test_case_14_one_forward_two_losses_two_backwards_at_the_boundary() -> None:
    model = sharded()
    acc = Accumulator(model, 2)
    for index in range(2):
        x, y, _ = data(rank(), index)
        with acc.step():
            output = model(x)
            acc.backward((output - y).square().mean(), retain_graph=True)
            acc.backward((output - y).abs().mean())
    reference = gradient(plain_net(), everyone(range(2)), loss=square_and_absolute)
    same(grads(model), reference)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before backward", "after backward", "inside backward"])
@pytest.mark.parametrize("index", [1, 3], ids=["off the boundary", "at the boundary"])
def test_case_27_an_exception_then_reset_then_a_fresh_window(when: str, index: int) -> None:
    model = sharded()
    acc = Accumulator(model, 4)
    feed(acc, model, [data(rank(), i) for i in range(index)])
    with pytest.raises(ZeroDivisionError), acc.step():
        if when == "inside backward":
            handle = cast("Any", model)[1].register_full_backward_hook(fail)
        loss = loss_of(model, data(rank(), index))
        if when != "before backward":
            try:
                acc.backward(loss)
            finally:
                if when == "inside backward":
                    handle.remove()
        raise ZeroDivisionError
    assert acc.micro_steps == index
    acc.reset()
    model.zero_grad()  # which alone would not clear what fully_shard hides
    for _ in range(2):
        feed(acc, model, [data(rank(), i) for i in range(4)])
        assert acc.is_boundary
        matches(model, plain_net(), everyone(range(4)))
        model.zero_grad()


def fail(*args: object) -> None:
    raise ZeroDivisionError


@on_ranks(2)
def test_reset_drops_the_sums_that_fully_shard_hides() -> None:
    model = sharded()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 7), data(rank(), 8)])
    acc.reset()
    assert grads(model) == {}
    assert acc.position == 0
    feed(acc, model, [data(rank(), index) for index in range(3)])
    matches(model, plain_net(), everyone(range(3)))


@on_ranks(2)
def test_close_in_mid_window_drops_the_hidden_sums_as_well() -> None:
    model = sharded()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 7)])
    acc.close()
    with Collectives() as seen:
        run_backward(loss_of(model, data(rank(), 0)))
    assert len(seen.reductions) == 2
    matches(model, plain_net(), everyone([0]))


@on_ranks(2)
def test_case_29_two_sharded_models_in_one_accumulator() -> None:
    first, second = sharded(1), sharded(2)
    acc = Accumulator([first, second], 2)
    for index in range(2):
        with Collectives() as seen, acc.step():
            acc.backward(loss_of(first, data(rank(), index)) + loss_of(second, data(rank(), index)))
        assert len(seen.reductions) == (4 if index else 0)
    matches(first, plain_net(1), everyone(range(2)))
    matches(second, plain_net(2), everyone(range(2)))


@on_ranks(2)
def test_case_30_layers_alone_sharded_under_a_plain_root_are_found() -> None:
    model = BY_NAME["fsdp2-children"].build()
    acc = Accumulator(model, 2)
    assert "blocks.0" in repr(acc)
    counts = []
    for index in range(2):
        with Collectives() as seen:
            feed(acc, model, [data(rank(), index)])
        counts.append(len(seen.reductions))
    assert counts == [0, 3]


@on_ranks(2)
@pytest.mark.parametrize("forward_first", [False, True])
def test_case_31_a_submodule_of_an_fsdp1_model_is_refused_before_any_update(forward_first: bool) -> None:
    model = BY_NAME["fsdp1-full"].build()
    if forward_first:
        run_backward(loss_of(model, data(rank(), 0)))
        model.zero_grad()
    with pytest.raises(UnsupportedWrapperError, match="outermost"):
        acc = Accumulator(model.blocks[0], 2)
        feed(acc, model, [data(rank(), index) for index in range(2)])


@on_ranks(2)
def test_case_36_the_norm_under_fsdp1_is_the_oracles() -> None:
    for name in ("fsdp1-full", "fsdp1-grad-op-orig", "fsdp1-no-shard", "fsdp2"):
        row = BY_NAME[name]
        for norm_type in (2.0, 1.0, float("inf")):
            model = row.build()
            acc = Accumulator(model, 2)
            feed(acc, model, [data(rank(), index) for index in range(2)])
            reference = gradient(row.seed(), everyone(range(2)))
            flat = torch.cat([value.flatten() for value in reference.values()])
            expected = torch.linalg.vector_norm(flat, norm_type)
            norm = acc.clip_grad_norm_(1e-2, norm_type)
            assert float(norm) == pytest.approx(float(expected), rel=1e-10)
            clipped = torch.cat([value.flatten() for value in row.gradients(model).values()])
            assert float(torch.linalg.vector_norm(clipped, norm_type)) == pytest.approx(1e-2, rel=1e-3)
            acc.close()


class Late(nn.Module):
    """A model one of whose layers is used only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.stem = nn.Linear(8, 8)
            self.late = nn.Linear(8, 8)

    def forward(self, x: Tensor, use_late: bool) -> Tensor:
        x = torch.tanh(self.stem(x))
        return x + self.late(x) if use_late else x


@on_ranks(2)
@pytest.mark.parametrize("units", ["one unit", "a unit each"])
@pytest.mark.parametrize("plan", [(False, False, True), (True, True, False), (False, True, False)], ids=str)
def test_case_45_mixed_precision_and_a_parameter_used_in_part_of_the_window(units: str, plan: tuple[bool, ...]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Late()
    if units == "a unit each":
        fully_shard(model.stem, mp_policy=policy)
        fully_shard(model.late, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    acc = Accumulator(model, 3)
    try:
        for index, use_late in enumerate(plan):
            x, y, _ = data(rank(), index)
            with acc.step():
                acc.backward((model(x.float(), use_late).float() - y.float()).square().mean())
    except AccumulateError as error:
        if "dtype" in str(error) or "used" in str(error):
            return  # an error that explains is right as well
        raise
    reference = Late().double()
    for r in range(2):
        for index, use_late in enumerate(plan):
            x, y, _ = data(r, index)
            run_backward((reference(x, use_late) - y).square().mean() / 6)
    same(grads(model), grads(reference), 5e-2)


@on_ranks(2)
def test_case_48_an_exception_off_the_boundary_then_a_backward_without_the_library() -> None:
    model = sharded()
    acc = Accumulator(model, 4)
    with pytest.raises(ZeroDivisionError), acc.step():
        loss = loss_of(model, data(rank(), 0))
        raise ZeroDivisionError
    with Collectives() as seen:
        run_backward(loss)
    assert len(seen.reductions) == 2
    matches(model, plain_net(), everyone([0]))
    acc.close()


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1-full"])
def test_case_54_clipping_in_mid_window_raises(name: str) -> None:
    model = BY_NAME[name].build()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    with pytest.raises(WindowError, match="clip_grad_norm_"):
        acc.clip_grad_norm_(1.0)


def flags(model: nn.Module) -> list[object]:
    """What torch reads when backward runs, for each sharded unit."""
    found: list[object] = []
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            group: Any = state()._fsdp_param_group
            found += [(group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward)]
        elif hasattr(module, "_sync_gradients"):
            found.append(module._sync_gradients)
    return found


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-children", "fsdp1-full"])
def test_flags_are_put_back_to_what_was_there_after_each_block_and_after_an_exception(name: str) -> None:
    model: Any = BY_NAME[name].build()
    if name == "fsdp2":
        model.blocks[0].set_reshard_after_backward(False)  # a user's own setting
    before = flags(model)
    assert len(before) == 3
    acc = Accumulator(model, 3)
    with acc.step():
        assert flags(model) != before
        acc.backward(loss_of(model, data(rank(), 0)))
    assert flags(model) == before
    with pytest.raises(ZeroDivisionError), acc.step():
        raise ZeroDivisionError
    assert flags(model) == before
    with no_sync(model):
        assert flags(model) != before
    assert flags(model) == before
    acc.reset()
    acc.close()
    assert flags(model) == before


@on_ranks(2)
def test_the_update_is_seen_by_the_next_forward() -> None:
    model, reference = sharded(), plain_net()
    acc = Accumulator(model, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    for window in range(3):
        indices = (2 * window, 2 * window + 1)
        feed(acc, model, [data(rank(), index) for index in indices])
        same(grads(model), gradient(reference, everyone(indices)))
        for term in everyone(indices):
            run_backward(loss_of(reference, term) / 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_parameters_are_gathered_no_more_often_than_the_design_says() -> None:
    model = BY_NAME["fsdp2"].build()
    acc = Accumulator(model, 4)
    counts = []
    for window in range(2):
        counts.append(0)
        for index in range(4):
            with Collectives() as seen:
                feed(acc, model, [data(rank(), 4 * window + index)])
            counts[-1] += sum(one.numel for one in seen.gathers)
        model.zero_grad()
    total = sum(p.numel() for p in Net().parameters())
    root = sum(p.numel() for p in Net().head.parameters())
    most = total + 4 * (total - root)  # 1 + N(1 - r), in units of the model
    assert total < counts[1] <= most, counts


@on_ranks(2)
def test_parameters_outside_every_unit_are_warned_about() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Net().double()
    for block in model.blocks:
        fully_shard(block)
    with pytest.warns(UserWarning, match="head"):
        Accumulator(model, 2)


@on_ranks(4)
@pytest.mark.parametrize("closed", ["by count", "by flush"])
def test_ranks_that_share_a_sample_are_not_counted_twice(closed: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(*cast("nn.Sequential", plain_net()), nn.Tanh())  # torch warns of outputs that are views
    seed = copy.deepcopy(model)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    acc = Accumulator(model, 2 if closed == "by count" else 3)
    assert "ranks=2" in repr(acc)
    terms = [[Term(*data(r, i)[:2], 1.0 + 2 * r + i) for i in range(2)] for r in range(2)]
    for _ in range(2):
        feed(acc, model, terms[mesh["data"].get_local_rank()], weighted=True)
        assert acc.is_boundary or acc.flush()
        reference = gradient(seed, [*terms[0], *terms[1]])
        same(grads(model), reference)
        norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in reference.values()]))
        assert float(acc.clip_grad_norm_(1e9)) == pytest.approx(float(norm))
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp1-full", "fsdp1-full-orig", "fsdp2", "fsdp2-unsharded", "replicate"])
@pytest.mark.parametrize("how", ["model", "model, set_to_none=False", "optimizer"])
def test_case_18_clearing_in_mid_window_is_harmless_or_an_error(name: str, how: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 0)])
    if how == "optimizer":
        optimizer.zero_grad()
    else:
        model.zero_grad(set_to_none=how == "model")
    try:
        feed(acc, model, [data(rank(), 1), data(rank(), 2)])
    except WindowError:
        return
    same(row.gradients(model), gradient(row.seed(), everyone(range(3))))


@on_ranks(2)
@pytest.mark.parametrize("name", ["fsdp1-full", "fsdp1-full-orig", "fsdp2", "replicate"])
def test_a_backward_outside_any_block_in_mid_window_is_an_error_at_the_next_block(name: str) -> None:
    model = BY_NAME[name].build()
    acc = Accumulator(model, 3)
    feed(acc, model, [data(rank(), 0)])
    run_backward(loss_of(model, data(rank(), 1)))
    with pytest.raises(WindowError, match="reset"):
        feed(acc, model, [data(rank(), 2)])


@on_ranks(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp1-full", "fsdp1-grad-op-orig", "fsdp1-no-shard", "fsdp2", "hsdp-of-two"])
def test_case_15_a_boundary_without_any_backward_is_an_error(name: str) -> None:
    row = BY_NAME["fsdp2" if name == "hsdp-of-two" else name]
    model = fsdp2(row.seed(), mesh=(2, 1)) if name == "hsdp-of-two" else row.build()
    acc = Accumulator(model, 2)
    feed(acc, model, [data(rank(), 0)])
    with pytest.raises(AccumulateError, match="ran no backward"), acc.step():
        pass
    assert not acc.is_boundary
    acc.reset()
    feed(acc, model, [data(rank(), 0), data(rank(), 1)])
    same(row.gradients(model), gradient(row.seed(), everyone(range(2))))
