"""What one run of the benchmark compares, and the settings that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """One column of the comparison: a loop, and how many processes run it."""

    name: str
    alone: bool = False

    def label(self, ranks: int) -> str:
        """How the table calls it."""
        many = f"{ranks} process{'es' if ranks > 1 else ''}"
        return {
            "one_process": "1 process",
            "reduce_every": f"{many}, reduce every micro-batch",
            "no_sync": f"{many}, hand-written no_sync",
            "accumulate": f"{many}, accumulate",
            "no_reduction": f"{many}, nothing reduced (ceiling)",
        }[self.name]


ONE = Mode("one_process", alone=True)
EVERY = Mode("reduce_every")
HAND = Mode("no_sync")
ACCUMULATE = Mode("accumulate")
SILENT = Mode("no_reduction")
REDUCING = (EVERY, HAND, ACCUMULATE)


@dataclass(frozen=True)
class Options:
    """The settings of one run, checked; see ``python -m accumulate bench --help``."""

    ranks: int = 2
    device: str = "cpu"
    wrapper: str = "ddp"
    policy: str = "balanced"
    steps: Sequence[int] = (1, 4, 8, 32)
    rounds: int | None = None
    layers: int = 6
    width: int = 512
    heads: int = 8
    tokens: int = 64
    batch: int = 1
    data: str = "digits"
    seconds: float = 150.0
    timeout: float = 300.0

    @property
    def backend(self) -> str:
        """The process group's backend."""
        return "nccl" if self.device == "cuda" else "gloo"

    def cells(self) -> list[tuple[Mode, int]]:
        """One round in the order it is measured: the modes side by side, so that noise hits all alike."""
        cells = [(mode, steps) for steps in self.steps for mode in (ONE, *REDUCING)]
        return [*cells, (SILENT, max(self.steps))]


def windows(steps: int) -> int:
    """How many windows one sample holds: at least four micro-batches, or the clock sees mostly jitter."""
    return max(1, -(-4 // steps))
