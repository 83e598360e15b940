"""The conformance table: every arrangement of model and wrapper that the library promises to get right, one row each.

A row says how to build the model, and how many gradient reductions torch itself makes for one synchronised
backward. A new wrapper is one row here (and one adapter); ``test_conformance.py`` runs each row through the
same battery.

The models are small, but every bucket of theirs has more elements than a sum of weights, so that both can be
told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ARRANGEMENTS", "BY_NAME", "Arrangement"]


# -- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Three units: two blocks and a head. Subclasses bend one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 8)

    def hidden(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.square()], dim=1)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


class WithBuffers(Net):
    """Buffers of two dtypes, batch statistics included; what they hold does not enter the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def hidden(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.norm(super().hidden(x)))


class Frozen(Net):
    """The first block does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Shared(Net):
    """The same layer twice, registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


class Branching(Net):
    """A head that is used only for batches whose first value is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden) + (self.other(hidden) if x[0, 0] > 0 else 0.0)


class Checkpointed(Net):
    """Each block is recomputed in backward."""

    reentrant = False

    def hidden(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.square()], dim=1)
        if self.reentrant:
            x = x.requires_grad_()  # a reentrant checkpoint works only behind something that needs a gradient
        for block in self.blocks:
            x = cast("Tensor", checkpoint(block, x, use_reentrant=self.reentrant))
        return x


class CheckpointedReentrant(Checkpointed):
    """The same with the older kind of checkpoint."""

    reentrant = True


class LowRank(nn.Module):
    """A matrix whose gradient has rank 1, so that PowerSGD of rank 1 loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 1, bias=False)
        self.wide = nn.Linear(1, 16, bias=False)
        self.square = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.square(self.wide(self.narrow(x))))[:, :8]


class Pair(Net):
    """Outputs a tuple of which the second is not used in the loss."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden), hidden.detach()


class Dictionary(Net):
    """Outputs a nested dict."""

    def forward(self, x: Tensor) -> Any:
        return {"inner": [{"logits": self.head(self.hidden(x))}], "note": "not a tensor"}


@dataclass
class Output:
    """What ``Structured`` returns."""

    logits: Tensor
    hidden: Tensor | None = None


class Structured(Net):
    """Outputs a dataclass."""

    def forward(self, x: Tensor) -> Any:
        return Output(self.head(self.hidden(x)))


class Shell(nn.Module):
    """A plain root with a wrapped body and a head of its own outside."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Nested(nn.Module):
    """A body, to be wrapped by itself, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = Net()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(x))


class Two(nn.Module):
    """Two models of one list, for the oracle's eyes one module."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList([Net(), Net()])

    def forward(self, x: Tensor) -> Any:
        return torch.stack([model(x) for model in self.models])


# -- wrappers ---------------------------------------------------------------------------------------------------------


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, **options)


def ddp_hooked(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    wrapped = cast("Any", ddp(model))
    if dtype is torch.float16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    else:
        wrapped.register_comm_hook(dtype, lambda state, bucket: compress(state, bucket))
    return cast("nn.Module", wrapped)


def compress(dtype: torch.dtype, bucket: Any) -> Any:
    """A communication hook: send the mean in fewer bits."""
    small = bucket.buffer().to(dtype).div_(dist.get_world_size())
    work: Any = dist.all_reduce(small, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


def ddp_power(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    wrapped = cast("Any", ddp(model))
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2)

    def counted(state: Any, bucket: Any) -> Any:
        HOOK_CALLS.append(bucket.index())
        return power.powerSGD_hook(state, bucket)

    # torch compares the annotations of a hook with types, and those of this file are strings; a lambda has none
    wrapped.register_comm_hook(state, lambda state, bucket: counted(state, bucket))
    return cast("nn.Module", wrapped)


def ddp_ignoring(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    untyped: Any = DistributedDataParallel
    untyped._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    return ddp(model)


def ddp_subgroup(model: nn.Module) -> nn.Module:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return ddp(model, process_group=groups[dist.get_rank() // 2])


def ddp_nested(model: nn.Module) -> nn.Module:
    assert isinstance(model, Nested)
    model.body = ddp(model.body)
    return ddp(model)


def ddp_with_compiled(model: nn.Module) -> nn.Module:
    return ddp(cast("nn.Module", torch.compile(model, backend="aot_eager")))


def compiled(model: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(model, backend="aot_eager"))


def first_plain(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Two)
    return [model.models[0], ddp(model.models[1])]


def both_wrapped(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Two)
    return [ddp(part) for part in model.models]


def fsdp1(model: nn.Module, strategy: str, use_orig_params: bool, **more: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options: Any = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
        **more,
    }
    if strategy == "HYBRID_SHARD":
        from torch.distributed.device_mesh import init_device_mesh

        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert isinstance(model, Net)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2(model: nn.Module, children_only: bool = False, mesh: tuple[int, ...] = (), **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if mesh:
        names = ("replicate", "shard")[-len(mesh) :]
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    assert isinstance(model, Net)
    for block in model.blocks:
        fully_shard(block, **options)
    if children_only:
        fully_shard(model.head, **options)
        return model
    return cast("nn.Module", fully_shard(model, **options))


def fsdp2_mixed(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp2(model, mp_policy=policy)


def replicated(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
    assert isinstance(model, Net)
    for block in model.blocks:
        replicate(block, mesh=mesh)
    return cast("nn.Module", replicate(model, mesh=mesh))


# -- the table --------------------------------------------------------------------------------------------------------

HOOK_CALLS: list[int] = []
"""The buckets that a counted hook was called with."""

IGNORED = ["blocks.1.linear.weight", "blocks.1.linear.bias"]


def tensor_of(output: Any) -> Tensor:
    """The tensor that the loss is made of, from any of the output types above."""
    while not isinstance(output, Tensor):
        if isinstance(output, Mapping):
            output = next(iter(output.values()))
        elif isinstance(output, (list, tuple)):
            output = output[0]
        else:
            output = output.logits
    return output


@dataclass(frozen=True)
class Arrangement:
    """One row: a model, its wrapper, and what torch does for one synchronised backward of it."""

    name: str
    wrapper: str
    """The wrapper's name in the documentation."""
    about: str
    """What is special in this row, as a sentence."""
    wrap: Callable[[nn.Module], Any] = field(repr=False)
    """Wraps a seed model; returns what the user gives to ``Accumulator``: a module, or a list of modules."""
    reductions: tuple[int, ...] = (1,)
    """Gradient reductions in the first, second, ... synchronised backward; the last number holds from then on."""
    seed_class: type[nn.Module] = Net
    world: int = 2
    group: int = 0
    """Ranks that average with each other; 0 means all of them."""
    tolerance: float = 1e-10
    """The largest relative difference from the float64 oracle; more than rounding needs a reason in ``about``."""
    dtype: torch.dtype = torch.float64
    local: tuple[str, ...] = ()
    """Names (beginnings) of parameters that no wrapper reduces; the battery does not update them."""
    first_microbatch_reduced: bool = False
    """The very first micro-batch has to be reduced in any case (DDP's ``static_graph``)."""
    compiled: bool = False
    """Count around backward only (dynamo does not compile under a dispatch mode), and keep shapes fixed."""
    counts_hook: bool = False
    """Count calls of the communication hook, which sends more from other threads when and as it likes."""
    warns: str = ""
    """The one warning that the library gives at construction or in the first window."""

    def seed(self) -> nn.Module:
        """The unwrapped model in float64, the same on every rank and in the oracle."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.seed_class().double()

    def build(self) -> Any:
        """The wrapped model, or the list of them."""
        return self.wrap(self.seed().to(self.dtype))

    def forward(self, model: Any, x: Tensor) -> Tensor:
        """The output tensor of the model, or the stacked outputs of a list of models."""
        if isinstance(model, list):
            return torch.stack([tensor_of(part(x)) for part in model])
        return tensor_of(model(x.to(self.dtype)))

    def peers(self, rank: int) -> list[int]:
        """The ranks whose samples are in this rank's gradient, itself included."""
        size = self.group or self.world
        first = rank // size * size
        return list(range(first, first + size))

    def reductions_of(self, index: int) -> int:
        """How many gradient reductions the ``index``-th synchronised backward makes."""
        return self.reductions[min(index, len(self.reductions) - 1)]

    def named(self, model: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the wrapped model or models under the names of the seed model."""
        return _named(model)

    def is_local(self, name: str) -> bool:
        return name.startswith(self.local)

    def parameters(self, model: Any) -> dict[str, Tensor]:
        """Every parameter, unsharded, by its name in the seed model."""
        if self.wrapper == "FSDP1":
            from torch.distributed.fsdp import FullyShardedDataParallel

            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                return {name: p.detach().clone() for name, p in _named(model)}
        return {name: _full(p.detach()) for name, p in _named(model)}

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Every gradient there is, unsharded, by the parameter's name in the seed model."""
        if self.wrapper == "FSDP1":
            return self._gradients_by_step(model)
        return {name: _full(p.grad) for name, p in _named(model) if p.grad is not None}

    def _gradients_by_step(self, model: Any) -> dict[str, Tensor]:
        """FSDP1 shows flat shards only: take what one SGD step of size 1 changes, and put it back."""
        before = self.parameters(model)
        pieces = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, grad in pieces:
                p -= grad
            after = self.parameters(model)
            for p, grad in pieces:
                p += grad
        return {name: before[name] - after[name] for name in before}


def _full(tensor: Tensor) -> Tensor:
    return cast("Any", tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


_INSERTED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def _named(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters of a model or a list, under the seed's names."""
    if isinstance(model, list):
        for index, part in enumerate(model):
            for name, parameter in _named(part):
                yield f"models.{index}.{name}", parameter
        return
    skip = {"body"} if isinstance(model, Shell) else set()
    for name, parameter in model.named_parameters():
        yield ".".join(part for part in name.split(".") if part not in _INSERTED | skip), parameter


_D, _F1, _F2 = "DDP", "FSDP1", "FSDP2"

ARRANGEMENTS: tuple[Arrangement, ...] = (
    Arrangement("plain", "none", "no wrapper: nothing is sent", lambda m: m, (0,), world=1),
    Arrangement("plain-compiled", "none", "torch.compile without a wrapper", compiled, (0,), world=1, compiled=True),
    Arrangement("ddp", _D, "the defaults", ddp),
    Arrangement("ddp-bucket-view", _D, "gradient_as_bucket_view=True", lambda m: ddp(m, gradient_as_bucket_view=True)),
    Arrangement("ddp-small-buckets", _D, "several buckets", lambda m: ddp(m, bucket_cap_mb=0.001), (1, 3)),
    Arrangement(
        "ddp-find-unused",
        _D,
        "find_unused_parameters=True, and a head that some micro-batches do not use",
        lambda m: ddp(m, find_unused_parameters=True),
        seed_class=Branching,
    ),
    Arrangement(
        "ddp-static-graph",
        _D,
        "static_graph=True: torch has to reduce the very first micro-batch as well",
        lambda m: ddp(m, static_graph=True),
        first_microbatch_reduced=True,
    ),
    Arrangement(
        "ddp-buffers",
        _D,
        "BatchNorm, and buffers broadcast (DDP's default): they are sent at most once per window",
        ddp,
        seed_class=WithBuffers,
        warns="BatchNorm",
    ),
    Arrangement(
        "ddp-fp16-hook",
        _D,
        "fp16_compress_hook; gradients are sent with 11 bits, so they agree to 2e-3",
        lambda m: ddp_hooked(m, torch.float16),
        tolerance=2e-3,
    ),
    Arrangement(
        "ddp-bf16-hook",
        _D,
        "a hook as bf16_compress_hook, which torch has for GPUs only; 8 bits are sent, so gradients agree to 1.5e-2",
        lambda m: ddp_hooked(m, torch.bfloat16),
        tolerance=1.5e-2,
    ),
    Arrangement(
        "ddp-powersgd",
        _D,
        "PowerSGD of rank 1 from the third window on; its approximation of a rank-1 gradient agrees to 1e-5",
        ddp_power,
        seed_class=LowRank,
        counts_hook=True,
        tolerance=1e-5,
    ),
    Arrangement("ddp-ignored", _D, "parameters that DDP ignores stay local", ddp_ignoring, local=tuple(IGNORED)),
    Arrangement("ddp-frozen", _D, "parameters without requires_grad", ddp, seed_class=Frozen),
    Arrangement("ddp-shared", _D, "one layer used twice", ddp, seed_class=Shared),
    Arrangement("ddp-subgroup", _D, "a process group of two of four ranks", ddp_subgroup, world=4, group=2),
    Arrangement("ddp-one-rank", _D, "world size 1", ddp, world=1),
    Arrangement("ddp-under-plain", _D, "DDP inside a plain root, as in an EMA shell", lambda m: Shell(ddp(m))),
    Arrangement("ddp-nested", _D, "DDP inside DDP: each reduces what it holds", ddp_nested, (2,), seed_class=Nested),
    Arrangement("ddp-compiled-outside", _D, "torch.compile(DDP(m))", lambda m: compiled(ddp(m)), compiled=True),
    Arrangement("ddp-compiled-inside", _D, "DDP(torch.compile(m))", ddp_with_compiled, compiled=True),
    Arrangement("ddp-checkpoint", _D, "non-reentrant checkpoints", ddp, seed_class=Checkpointed),
    Arrangement("ddp-checkpoint-reentrant", _D, "reentrant checkpoints", ddp, seed_class=CheckpointedReentrant),
    Arrangement("ddp-tuple", _D, "a model that returns a tuple", ddp, seed_class=Pair),
    Arrangement("ddp-dict", _D, "a model that returns a nested dict", ddp, seed_class=Dictionary),
    Arrangement("ddp-dataclass", _D, "a model that returns a dataclass", ddp, seed_class=Structured),
    Arrangement(
        "several",
        "several",
        "a list of a plain model and a DDP model; the plain one stays local",
        first_plain,
        seed_class=Two,
        local=("models.0.",),
    ),
    Arrangement("several-ddp", "several", "a list of two DDP models", both_wrapped, (2,), Two),
    Arrangement("fsdp1-full", _F1, "FULL_SHARD, flat parameters", lambda m: fsdp1(m, "FULL_SHARD", False), (3,)),
    Arrangement("fsdp1-full-orig", _F1, "FULL_SHARD, use_orig_params", lambda m: fsdp1(m, "FULL_SHARD", True), (3,)),
    Arrangement("fsdp1-grad-op", _F1, "SHARD_GRAD_OP", lambda m: fsdp1(m, "SHARD_GRAD_OP", False), (3,)),
    Arrangement(
        "fsdp1-grad-op-orig", _F1, "SHARD_GRAD_OP, use_orig_params", lambda m: fsdp1(m, "SHARD_GRAD_OP", True), (3,)
    ),
    Arrangement("fsdp1-no-shard", _F1, "NO_SHARD", lambda m: fsdp1(m, "NO_SHARD", False), (3,)),
    Arrangement("fsdp1-no-shard-orig", _F1, "NO_SHARD, use_orig_params", lambda m: fsdp1(m, "NO_SHARD", True), (3,)),
    Arrangement(
        "fsdp1-hybrid",
        _F1,
        "HYBRID_SHARD on 2 x 2 ranks",
        lambda m: fsdp1(m, "HYBRID_SHARD", True),
        (6,),
        world=4,
    ),
    Arrangement("fsdp2", _F2, "fully_shard on the layers and the root", fsdp2, (3,)),
    Arrangement("fsdp2-children", _F2, "fully_shard on the layers only", lambda m: fsdp2(m, children_only=True), (3,)),
    Arrangement("fsdp2-one-rank", _F2, "world size 1, where torch copies instead of sending", fsdp2, (0,), world=1),
    Arrangement(
        "fsdp2-unsharded", _F2, "reshard_after_forward=False", lambda m: fsdp2(m, reshard_after_forward=False), (3,)
    ),
    Arrangement(
        "fsdp2-mixed",
        _F2,
        "bfloat16 parameters, float32 reduction; forward and backward keep 8 bits, so gradients agree to 5e-2",
        fsdp2_mixed,
        (3,),
        tolerance=5e-2,
        dtype=torch.float32,
    ),
    Arrangement(
        "fsdp2-compiled", _F2, "torch.compile around fully_shard", lambda m: compiled(fsdp2(m)), (3,), compiled=True
    ),
    Arrangement("replicate", _F2, "replicate, the kind that is made of fully_shard", replicated, (3,)),
    Arrangement(
        "hsdp", "HSDP", "2 x 2: shards of two ranks, replicated twice", lambda m: fsdp2(m, mesh=(2, 2)), (6,), world=4
    ),
)

BY_NAME: dict[str, Arrangement] = {row.name: row for row in ARRANGEMENTS}
