"""Gradient accumulation for hand-written PyTorch loops: N micro-batches, one exact gradient, one reduction."""

from ._accumulator import Accumulator
from ._check import check
from ._contexts import no_sync
from ._errors import AccumulateError, UnsupportedWrapperError, WindowError
from ._sync import SyncControl, register
from ._version import __version__

__all__ = [
    "AccumulateError",
    "Accumulator",
    "SyncControl",
    "UnsupportedWrapperError",
    "WindowError",
    "__version__",
    "check",
    "no_sync",
    "register",
]
