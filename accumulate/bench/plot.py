"""Efficiency over steps, as a PNG. matplotlib is imported here only, so the bench runs without it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from accumulate.bench.plan import REDUCING, SILENT

if TYPE_CHECKING:
    from accumulate.bench.measure import Result

INSTALL = "pip install 'torch-accumulate[bench]'"


def missing() -> str | None:
    """What to do before --plot can work, or None if it can."""
    if importlib.util.find_spec("matplotlib"):
        return None
    return f"--plot needs matplotlib, which is not installed: {INSTALL}"


def save(result: Result, path: str) -> None:
    """Write the picture to ``path``."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    steps = list(result.options.steps)
    for mode, marker in zip(REDUCING, ("v", "s", "o"), strict=True):
        values = [100 * result.cell(mode, count).efficiency for count in steps]
        axes.plot(steps, values, marker=marker, label=mode.label(result.options.ranks))
    ceiling = 100 * result.cell(SILENT, steps[-1]).efficiency
    axes.axhline(ceiling, color="grey", linestyle=":", label=SILENT.label(result.options.ranks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [str(count) for count in steps])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches per window (steps)")
    axes.set_ylabel("efficiency against 1 process, %")
    axes.set_title(f"{result.options.wrapper.upper()} over {result.options.backend}, {result.options.ranks} ranks")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
