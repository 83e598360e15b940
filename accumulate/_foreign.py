"""Modules that synchronise gradients in a way that this library does not know, by their names."""

from __future__ import annotations

from torch import nn

from ._errors import UnsupportedWrapperError

__all__ = ["refuse_unknown"]

_FOREIGN = {
    "deepspeed.": "DeepSpeed's engine counts micro-batches itself: use its own gradient_accumulation_steps",
    "megatron.": "Megatron's schedule owns the accumulation: use its own no_sync_func",
    "torch_xla.": "use torch_xla's own accumulation",
    "torch.distributed._composable.replicate": "use DistributedDataParallel, or the replicate of fully_shard",
}


def refuse_unknown(name: str, module: nn.Module) -> None:
    """Raise for a module that is, or looks like, a wrapper without an adapter."""
    cls = type(module)  # never the instance: OptimizedModule forwards attributes of the module inside
    dotted = f"{cls.__module__}.{cls.__qualname__}"
    advice = next((text for prefix, text in _FOREIGN.items() if dotted.startswith(prefix)), None)
    looks_like_one = any(hasattr(cls, flag) for flag in ("no_sync", "set_requires_gradient_sync"))
    if not looks_like_one and not (advice and "Parallel" in cls.__name__):
        return
    raise UnsupportedWrapperError(
        f"{name} is a {dotted}, which synchronises gradients in a way this library does not know. Supported are "
        f"DistributedDataParallel, FullyShardedDataParallel and fully_shard; "
        f"{advice or 'for another wrapper write a SyncControl and call accumulate.register(wrapper, control)'}."
    )
