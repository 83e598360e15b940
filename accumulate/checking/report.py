"""What a check found, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["COUPLES", "SCALE", "Finding", "Report"]

COUPLES, SCALE = "couples the batch", "data-dependent scale"


class Finding(NamedTuple):
    """One thing that is wrong: its short name, how it shows, and what to do."""

    cause: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """Whether a window of micro-batches gives the gradient of one big batch; ``str`` of it says all there is."""

    ok: bool
    cause: str | None
    """A short string; several are joined by commas. None if ok."""
    ratio: float
    """The accumulated gradient over the big batch's, by least squares over all parameters; 1 is right."""
    errors: dict[str, float]
    """The relative error of the accumulated gradient of each parameter."""
    steps: int
    rows: int
    precision: str
    """The dtype in which the gradients were compared."""
    findings: tuple[Finding, ...] = ()
    """What was found, the gravest first."""
    notes: tuple[str, ...] = ()
    """What is worth knowing although it is not wrong."""

    def __str__(self) -> str:
        verdict, same = ("ok", "the same gradient") if self.ok else ("NOT OK", "different gradients")
        largest = f"largest relative error {max(self.errors.values()):.1e}, in {self.precision}"
        lines = [f"{verdict}: {self.steps} micro-batches and one batch of {self.rows} rows give {same} ({largest})"]
        for finding in self.findings:
            lines += [f"cause: {finding.cause}", f"  {finding.why}", f"  {finding.remedy}"]
        if not self.ok:
            lines += [f"accumulated / big batch: {self.ratio:.4g}", *self._worst()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _worst(self, count: int = 5) -> list[str]:
        shown = {name: f"{error:.1e}" for name, error in self.errors.items()}
        names = sorted(shown, key=lambda name: (-float(shown[name]), name))[:count]
        width = max(map(len, names))
        head = f"relative error by parameter, the worst {len(names)} of {len(self.errors)}:"
        return [head, *(f"  {name:{width}}  {shown[name]}" for name in names)]

    def document(self) -> dict[str, object]:
        """The report as JSON has it, where numbers that are not finite are null."""
        return {
            **asdict(self),
            "ratio": _finite(self.ratio),
            "errors": {name: _finite(error) for name, error in self.errors.items()},
            "findings": [finding._asdict() for finding in self.findings],
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
