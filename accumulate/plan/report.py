"""The plan as tables, as sentences, and as JSON."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple, TextIO

import accumulate
from accumulate.plan.arguments import Options
from accumulate.plan.cost import forecast, limit, smallest
from accumulate.plan.volume import EACH, held

__all__ = ["document", "recommendations", "tables", "write"]


class Table(NamedTuple):
    """A title, the columns' names, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def write(options: Options, stream: TextIO) -> None:
    """Everything for people: with rich on a terminal, else plain text without colour."""
    stream.write(_heading(options) + "\n\n")
    for table in tables(options):
        if stream.isatty() and importlib.util.find_spec("rich"):
            _rich(table, stream)
        else:
            stream.write(_plain(table) + "\n")
    stream.write("".join(f"{line}\n" for line in recommendations(options)))


def tables(options: Options) -> list[Table]:
    """What a rank sends and how long that takes, for each window; and what it holds in between."""
    return [_windows(options), _memory(options)]


def _windows(options: Options) -> Table:
    sizes = ("gathered", "reduce-scattered", "all-reduced", "within node", "between nodes")
    columns = ("steps", "policy", *sizes, "sending", "window", "efficiency", "reducing each")
    rows = [_row(options, policy, steps) for steps in options.steps for policy in options.policies]
    used = [i for i, column in enumerate(zip(*rows, strict=True)) if set(column) != {"-"}]
    title = "Bytes that a rank sends per window, seconds, and compute / time"
    return Table(title, tuple(columns[i] for i in used), [tuple(row[i] for i in used) for row in rows])


def _row(options: Options, policy: str, steps: int) -> tuple[str, ...]:
    found, each = forecast(options.job, policy, steps), forecast(options.job, EACH, steps)
    name = policy if len(options.policies) > 1 else "-"
    sizes = [_bytes(size) for size in (*found.sent, found.within, found.between)]
    times = f"{found.sending:.3g} s", f"{found.seconds:.3g} s"
    return (str(steps), name, *sizes, *times, f"{found.efficiency:.1%}", f"{each.efficiency:.1%}")


def _memory(options: Options) -> Table:
    columns = ("policy", "parameters", "unsharded", "gradients", "optimizer", "together")
    rows: list[tuple[str, ...]] = []
    for policy in options.policies:
        memory = held(options.job.model, options.job.wrapper, policy, options.job.shards)
        rows.append((policy, *(_bytes(size) for size in (*memory, memory.total))))
    return Table("Bytes that a rank holds between micro-batches, without activations", columns, rows)


def recommendations(options: Options) -> Iterator[str]:
    """For each policy the smallest window that is efficient enough, or why there is none."""
    job, wanted = options.job, f"{options.efficiency:.0%}"
    for policy in options.policies:
        steps = smallest(job, policy, options.efficiency)
        if steps is None:
            most = f"{limit(job, policy):.1%}"
            yield f"{policy}: no window reaches {wanted}; longer ones approach {most}.{_advice(job.wrapper, policy)}"
        else:
            found, every = forecast(job, policy, steps).efficiency, steps * job.cluster.ranks
            yield (
                f"{policy}: steps={steps} is the smallest window that reaches {wanted} ({found:.1%}); "
                f"{every:,} micro-batches to an update, over all ranks."
            )


def _advice(wrapper: str, policy: str) -> str:
    if wrapper == "fsdp1":
        return " FSDP1 gathers parameters in each micro-batch; fully_shard with --policy speed does not."
    if policy != "speed" and wrapper != "ddp":
        return " Each micro-batch gathers parameters; --policy speed does not, if the memory allows it."
    return " The model or its micro-batches are too small for these links."


def document(options: Options) -> dict[str, object]:
    """The same for programs: the keys are stable within a major version."""
    job = options.job
    every = (*options.policies, EACH)
    return {
        "accumulate": accumulate.__version__,
        "job": {**asdict(job), "ranks": job.cluster.ranks},
        "efficiency": options.efficiency,
        "recommended": {policy: smallest(job, policy, options.efficiency) for policy in options.policies},
        "limit": {policy: limit(job, policy) for policy in options.policies},
        "memory": {policy: held(job.model, job.wrapper, policy, job.shards)._asdict() for policy in options.policies},
        "results": [_entry(options, policy, steps) for steps in options.steps for policy in every],
    }


def _entry(options: Options, policy: str, steps: int) -> dict[str, object]:
    found = forecast(options.job, policy, steps)
    return {
        "steps": steps,
        "policy": policy,
        "microbatches_per_update": steps * options.job.cluster.ranks,
        "payload_bytes": found.payload._asdict(),
        "sent_bytes": {**found.sent._asdict(), "within": found.within, "between": found.between},
        "communication_seconds": found.sending,
        "window_seconds": found.seconds,
        "efficiency": found.efficiency,
    }


def _heading(options: Options) -> str:
    job, cluster, model = options.job, options.job.cluster, options.job.model
    copies = f", each copy on {job.shards} ranks" if job.wrapper == "hsdp" else ""
    return (
        f"{job.wrapper.upper()}, {model.parameters / 1e6:,.6g} M parameters: stored in {model.stored}, gathered in "
        f"{model.gathered}, reduced in {model.reduced} bytes each\n"
        f"{cluster.nodes} x {cluster.ranks_per_node} ranks{copies}; {_bytes(cluster.within)}/s within a node, "
        f"{_bytes(cluster.between)}/s between nodes; {job.compute:.3g} s for a micro-batch"
    )


def _bytes(size: float) -> str:
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= unit:
            return f"{size / unit:.3g} {prefix}B" if size < 999.5 * unit else f"{size / unit:,.0f} {prefix}B"
    return f"{size:.3g} B" if size else "-"


def _plain(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if column == "policy" else str.rjust for column in table.columns]
    lines = ["  ".join(map(_pad, sides, row, widths)).rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([f"{table.title}:", lines[0], rule, *lines[1:], ""])


def _pad(side: Callable[[str, int], str], cell: str, width: int) -> str:
    return side(cell, width)


def _rich(table: Table, stream: TextIO) -> None:
    drawn = importlib.import_module("rich.table").Table(title=table.title, title_justify="left")
    for column in table.columns:
        drawn.add_column(column, justify="left" if column == "policy" else "right")
    for row in table.rows:
        drawn.add_row(*row)
    importlib.import_module("rich.console").Console(file=stream).print(drawn)
