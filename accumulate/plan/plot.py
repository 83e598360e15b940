"""Efficiency over the size of a window, as a PNG. matplotlib is imported here only."""

from __future__ import annotations

import importlib

from accumulate.plan.arguments import Options
from accumulate.plan.cost import forecast
from accumulate.plan.volume import EACH

__all__ = ["save"]


def save(options: Options, path: str) -> None:
    """Write the picture to ``path``."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    job, steps = options.job, options.steps
    for policy, marker in zip((*options.policies, EACH), "osDv", strict=False):
        values = [100 * forecast(job, policy, count).efficiency for count in steps]
        label = "reducing each micro-batch" if policy == EACH else policy
        axes.plot(steps, values, marker=marker, linestyle=":" if policy == EACH else "-", label=label)
    axes.axhline(100 * options.efficiency, color="grey", linestyle="--", label=f"wanted: {options.efficiency:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [str(count) for count in steps])
    axes.set_ylim(0, 103)
    axes.set_xlabel("micro-batches per window (steps)")
    axes.set_ylabel("predicted efficiency, %")
    axes.set_title(f"{job.wrapper.upper()}, {job.model.parameters / 1e6:,.6g} M parameters, {job.cluster.ranks} ranks")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
