"""What is worth a warning at construction: nothing is wrong yet, but a user may expect something else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import distributed as dist, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._sync import Found

__all__ = ["advice"]


def advice(models: Iterable[nn.Module], found: Sequence[Found], steps: object, group: object) -> Iterator[str]:
    """Every warning that applies."""
    models = list(models)
    if steps != 1:
        yield from _batch_statistics(models)
    if group is None:
        yield from _local_gradients(models, found)


def _batch_statistics(models: Iterable[nn.Module]) -> Iterator[str]:
    """BatchNorm in train mode, whose statistics are those of a micro-batch and not of the window."""
    layers = [m for model in models for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    if layers:
        yield (
            f"the model has {len(layers)} BatchNorm layers in train mode: they normalise with the statistics of each "
            "micro-batch, so a window is not the same as one big batch. Use GroupNorm or LayerNorm, or their eval mode."
        )


def _local_gradients(models: Iterable[nn.Module], found: Sequence[Found]) -> Iterator[str]:
    """Gradients that no wrapper averages although there are several ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if not found:
        yield (
            "torch.distributed is initialised, but the model has no wrapper: its gradients stay on this rank. Pass the "
            "wrapped model (DistributedDataParallel, fully_shard, ...), or group= if you average them yourself."
        )
    elif any(control.covers_subtree for _, control in found):
        averaged = {id(p) for _, control in found for p in control.module.parameters()}
        named = (item for model in models for item in model.named_parameters())
        if local := [name for name, p in named if p.requires_grad and id(p) not in averaged]:
            yield f"no FSDP unit holds {', '.join(local)}: nobody averages their gradients over the ranks"
