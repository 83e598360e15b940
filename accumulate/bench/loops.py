"""The loops that are compared, as a user would write them: each yields a function that runs one window.

The optimizer's step follows each window and is the same for all. ``model(tokens)`` returns a mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from accumulate import Accumulator

Window = Callable[[Sequence[Tensor]], None]


@contextmanager
def every(model: nn.Module, steps: int) -> Iterator[Window]:
    """Backward on each micro-batch, nothing else: a wrapper then reduces on each, a plain model never."""

    def window(microbatches: Sequence[Tensor]) -> None:
        for tokens in microbatches:
            (model(tokens) / steps).backward()

    yield window


@contextmanager
def hand_ddp(model: DistributedDataParallel, steps: int) -> Iterator[Window]:
    """DDP's ``no_sync`` around all micro-batches but the last."""

    def window(microbatches: Sequence[Tensor]) -> None:
        with model.no_sync():
            for tokens in microbatches[:-1]:
                (model(tokens) / steps).backward()
        (model(microbatches[-1]) / steps).backward()

    yield window


@contextmanager
def hand_fsdp2(model: FSDPModule, steps: int) -> Iterator[Window]:
    """FSDP2's ``set_requires_gradient_sync``, switched on for the last micro-batch."""
    assert isinstance(model, nn.Module)  # FSDPModule is a mix-in, which a type checker cannot know

    def window(microbatches: Sequence[Tensor]) -> None:
        for index, tokens in enumerate(microbatches):
            model.set_requires_gradient_sync(index == steps - 1)
            (model(tokens) / steps).backward()

    yield window


@contextmanager
def accumulate(model: nn.Module, steps: int, policy: str) -> Iterator[Window]:
    """This library."""
    with Accumulator(model, steps, policy=policy) as acc:

        def window(microbatches: Sequence[Tensor]) -> None:
            for tokens in microbatches:
                with acc.step():
                    acc.backward(model(tokens))

        yield window
