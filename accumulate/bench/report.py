"""The result as a table, as notes that say how far to trust it, and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

import accumulate
from accumulate.bench.cores import cores
from accumulate.bench.measure import NOISY, Cell, Result
from accumulate.bench.plan import ACCUMULATE, HAND, ONE, SILENT, Options

LOW = 0.75  # a ceiling below this makes a warning
COLUMNS = ("steps", "", "micro-batches/s", "efficiency", "spread", "reduced", "gathered")
UNDER = ("", "", "per process", "", "", "per window", "per window")


def table(result: Result) -> str:
    """The whole report, for people: plain text without colour."""
    rows: list[tuple[str, ...]] = [COLUMNS, UNDER]
    for steps in result.options.steps:
        cells = [cell for cell in result.cells if cell.steps == steps]
        rows += [_row(cell, result.options.ranks, first=cell is cells[0]) for cell in cells]
    if not any(cell.traffic.gathered for cell in result.cells):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_align(index, text, widths[index]) for index, text in enumerate(row)).rstrip() for row in rows]
    body = "\n".join([*lines[:2], "-" * max(map(len, lines)), *lines[2:]])
    return "\n\n".join([_heading(result), body, "\n".join(notes(result)), *warnings(result)])


def _wrapper(options: Options) -> str:
    policy = "" if options.policy == "balanced" else f", policy {options.policy}"
    return options.wrapper.upper() + policy


def notes(result: Result) -> Iterator[str]:
    """What the columns mean on this machine."""
    ranks, last = result.options.ranks, result.options.steps[-1]
    pairs = [(result.cell(ACCUMULATE, steps), result.cell(HAND, steps)) for steps in result.options.steps]
    ratios = ", ".join(f"{_ratio(ours, theirs):.2f}" for ours, theirs in pairs)
    yield f"accumulate's rate / hand-written no_sync's, steps by steps: {ratios}."
    yield "Efficiency: rate against 1 process in the same round, the other ranks idle; median of the rounds."
    if result.options.device == "cpu" and ranks > 1:
        ceiling = result.cell(SILENT, last).efficiency
        yield "1 process has the caches, memory and clock of idle neighbours to itself. Processes that reduce"
        yield f"  nothing share these: {ranks} reach {ceiling:.0%} at {last} steps, the ceiling here."
    yield "Bytes are counted, in a separate window: what each process hands to reductions (and all-gathers)."
    before, after = result.facts.loss, result.final_loss
    yield f"Loss of the model the ranks trained: {before:.3f} before, {after:.3f} after (nats per token)."


def _ratio(ours: Cell, theirs: Cell) -> float:
    return median(mine / other for mine, other in zip(ours.rates, theirs.rates, strict=True))


def warnings(result: Result) -> list[str]:
    """Reasons not to trust the numbers; empty if none was found."""
    found = []
    ranks, usable = result.options.ranks, len(cores())
    noisy = [cell for cell in result.cells if cell.spread > NOISY]
    if result.rounds == 1:
        found.append("WARNING: one round only, so nothing is known about noise. Try --rounds 3.")
    if noisy:
        worst = max(noisy, key=lambda cell: cell.spread)
        found.append(
            "WARNING: this machine was too noisy to trust these numbers. "
            f"{len(noisy)} of {len(result.cells)} rows\n  differ by more than {NOISY:.0%} between rounds; "
            f"worst: {worst.mode.label(ranks)}, {worst.steps} steps, {worst.spread:.0%}.\n"
            "  Stop other programs and run it again, with more --rounds."
        )
    ceiling = result.cell(SILENT, result.options.steps[-1]).efficiency
    if ranks <= usable and ceiling < LOW:
        found.append(
            f"WARNING: processes that reduce nothing reach only {ceiling:.0%} of one alone. Other programs\n"
            "  use the cores, or memory is the limit: the efficiencies say more about that than about reducing."
        )
    if result.options.device == "cpu" and ranks > usable:
        found.append(f"WARNING: {ranks} ranks share {usable} core(s): the rates say nothing about scaling.")
    return found


def document(result: Result) -> dict[str, object]:
    """The same for programs: the keys are stable within a major version."""
    o = result.options
    return {
        "versions": {
            "accumulate": accumulate.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"name": _machine(result), "cores": len(cores()), "system": platform.platform()},
        "ranks": o.ranks,
        "backend": o.backend,
        "wrapper": o.wrapper,
        "policy": o.policy,
        "data": result.facts.data,
        "model": {
            "layers": o.layers,
            "width": o.width,
            "heads": o.heads,
            "tokens": o.tokens,
            "batch": o.batch,
            "parameters": result.facts.parameters,
            "gradient_bytes": 4 * result.facts.parameters,
        },
        "rounds": result.rounds,
        "seconds": round(result.seconds, 1),
        "loss": {"before": result.facts.loss, "after": result.final_loss},
        "warnings": warnings(result),
        "results": [_entry(cell, o.ranks) for cell in result.cells],
    }


def _entry(cell: Cell, ranks: int) -> dict[str, object]:
    return {
        "mode": cell.mode.name,
        "processes": 1 if cell.mode.alone else ranks,
        "steps": cell.steps,
        "microbatches_per_second": cell.rate,
        "efficiency": cell.efficiency,
        "spread": cell.spread,
        "rates": cell.rates,
        "reductions_per_window": cell.traffic.reductions,
        "reduced_bytes_per_window": cell.traffic.reduced,
        "gathered_bytes_per_window": cell.traffic.gathered,
    }


def _heading(result: Result) -> str:
    o, million = result.options, result.facts.parameters / 1e6
    where = "one GPU each" if o.device == "cuda" else "one core and one thread each"
    return (
        f"GPT, layers {o.layers}, width {o.width}, heads {o.heads}: {million:.1f} M parameters, "
        f"{4 * million:.1f} MB of fp32 gradients\n"
        f"{result.facts.data}: {o.batch} x {o.tokens} tokens per micro-batch\n"
        f"{_wrapper(o)} over {o.backend}, {o.ranks} ranks, {where}; torch {torch.__version__}; "
        f"{_machine(result)}\n"
        f"{result.rounds} round{'s' * (result.rounds > 1)}, interleaved, {result.seconds:.0f} s in all"
    )


def _row(cell: Cell, ranks: int, *, first: bool) -> tuple[str, ...]:
    traffic = _megabytes(cell.traffic.reduced), _megabytes(cell.traffic.gathered)
    efficiency = "" if cell.mode == ONE else f"{cell.efficiency:.0%}"
    name = cell.mode.label(ranks)
    return (
        str(cell.steps) if first else "",
        name,
        f"{cell.rate:.2f}",
        efficiency,
        f"{cell.spread:.0%}" if len(cell.rates) > 1 else "?",
        *traffic,
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count else "-"


def _align(index: int, text: str, width: int) -> str:
    return text.ljust(width) if index == 1 else text.rjust(width)


def _machine(result: Result) -> str:
    if result.options.device == "cuda":
        return result.facts.device
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0] + f", {len(cores())} cores"
