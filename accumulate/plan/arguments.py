"""The arguments of ``python -m accumulate plan``: what they mean, which are refused, and what is assumed."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from accumulate.bench import plot
from accumulate.plan import units
from accumulate.plan.cost import Cluster, Job
from accumulate.plan.volume import POLICIES, WRAPPERS, Model

__all__ = ["Options", "declare", "options"]

ABOUT = """\
How many micro-batches per window does a cluster need? Computed before you rent it; nothing is run or measured.

For each number of micro-batches per window (--steps): the bytes that a rank sends, by kind of collective and within
and between nodes, the time that takes, and the efficiency: compute time over the window's time, so 100% is a window
without communication. Then the memory that a rank holds, and the smallest window that reaches --efficiency.
"""
EXAMPLES = """\
what is assumed:
  - Collectives move what rings move: (n-1)/n of the payload for an all-gather and a reduce-scatter, 2(n-1)/n for an
    all-reduce (a tree moves the same in fewer steps). Ranks of one node are neighbours in the ring.
  - Reductions, and the gathers of a backward, hide behind that backward: 2/3 of the micro-batch's compute. The gathers
    of a forward hide behind that forward: 1/3. What does not fit there is waited for, and so is the last bucket of DDP
    (25 MiB), the last unit's reduction and the first unit's gather. Collectives do not slow compute.
  - Links reach the bandwidth given, all ranks are equally fast, and the optimizer's step takes no time.

examples:
  7B parameters in bfloat16 on 8 nodes of 8 GPUs, 400 Gbit/s between them. A micro-batch of 4,096 tokens takes
  6 x 7e9 x 4096 FLOPs, which at 400 TFLOP/s is 0.43 s:

    python -m accumulate plan --parameters 7B --wrapper fsdp2 --param-dtype bf16 --reduce-dtype fp32 \\
        --nodes 8 --ranks-per-node 8 --between 400Gbit/s --within 450GB/s --compute 430ms

  ... --policy memory balanced speed       the policies side by side
  ... --wrapper hsdp                       each node holds a copy, so parameters are gathered inside it
  ... --plot efficiency.png                efficiency over the window's size as a picture
  ... --json - | jq .recommended           for programs; the table goes to stderr

exit status: 0 done, 1 a file could not be written, 2 bad arguments
"""


@dataclass(frozen=True)
class Options:
    """What is to be planned."""

    job: Job
    policies: tuple[str, ...]
    steps: tuple[int, ...]
    efficiency: float
    json: str | None
    plot: str | None


def declare(plan: argparse.ArgumentParser) -> None:
    """Add the arguments, and a help text that teaches the command by an example."""
    plan.description, plan.epilog = ABOUT, EXAMPLES
    plan.formatter_class = argparse.RawDescriptionHelpFormatter
    _model(plan.add_argument_group("model"))
    _cluster(plan.add_argument_group("cluster"))
    _what(plan.add_argument_group("windows"))
    output = plan.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write the plan as JSON; - is stdout, with the table on stderr")
    output.add_argument("--plot", metavar="FILE.png", help="draw efficiency over steps (needs matplotlib)")


def _model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--parameters", type=units.parameters, metavar="N", help="size of the model, such as 7B")
    add("--width", type=units.count, metavar="N", help="or its width: 12 x layers x width^2, and embedding and head")
    add("--layers", type=units.count, default=32, metavar="N", help="blocks, each a unit of FSDP (default: 32)")
    text = "of the embedding and the head, with --width (default: 32000)"
    add("--vocabulary", type=units.count, default=32000, metavar="N", help=text)
    text = "size of FSDP's root unit, which forward keeps (default: embedding and head; 0 with --parameters)"
    add("--root", type=units.parameters, metavar="N", help=text)
    names = ", ".join(units.DTYPES)
    text = f"of the parameters that the optimizer updates (default: fp32): {names}"
    add("--dtype", type=units.dtype, default=4, metavar="T", help=text)
    text = "of gathered parameters: FSDP's MixedPrecisionPolicy (default: --dtype)"
    add("--param-dtype", type=units.dtype, metavar="T", help=text)
    text = "of gradients on the wire (default: --param-dtype; with ddp --dtype, unless a hook compresses them)"
    add("--reduce-dtype", type=units.dtype, metavar="T", help=text)
    text = "bytes of optimizer state for each parameter (default: 8, AdamW in fp32)"
    add("--optimizer-bytes", type=units.count, default=8, metavar="N", help=text)


def _cluster(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--nodes", type=units.count, default=1, metavar="N", help="default: 1")
    add("--ranks-per-node", type=units.count, default=8, metavar="N", help="default: 8")
    text = "of one rank to the others of its node (default: 450GB/s, NVLink of an H100)"
    add("--within", type=units.bandwidth, default=450e9, metavar="RATE", help=text)
    text = "of one node to the others, all its links together (default: 400Gbit/s)"
    add("--between", type=units.bandwidth, default=50e9, metavar="RATE", help=text)
    add("--latency", type=units.duration, default=10e-6, metavar="T", help="of a collective's step (default: 10us)")
    text = "that one micro-batch computes, forward and backward, such as 430ms: about 6 x parameters x tokens / FLOP/s"
    add("--compute", type=units.duration, required=True, metavar="T", help=text)
    text = "collectives do not hide behind compute: the worst case, and FSDP on CPUs"
    add("--no-overlap", action="store_true", help=text)


def _what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--wrapper", choices=WRAPPERS, default="ddp", help="around the model (default: ddp)")
    text = "one or more of memory, balanced, speed (default: balanced); ddp has one way only"
    add("--policy", choices=POLICIES, nargs="+", default=["balanced"], metavar="P", help=text)
    text = "units keep their parameters from forward to backward, as under SHARD_GRAD_OP"
    add("--no-reshard-after-forward", action="store_true", help=text)
    text = "with hsdp: ranks that hold one copy of the model (default: those of a node)"
    add("--shard", type=units.count, metavar="N", help=text)
    steps = [1, 2, 4, 8, 16, 32]
    text = "micro-batches per window (default: 1 2 4 8 16 32)"
    add("--steps", type=units.count, nargs="+", default=steps, metavar="N", help=text)
    add("--efficiency", type=units.share, default=0.95, metavar="E", help="to recommend a window for (default: 0.95)")


def options(parsed: argparse.Namespace, plan: argparse.ArgumentParser) -> Options:
    """The checked settings; a bad one, alone or against the others, ends by ``plan.error``."""
    if parsed.compute <= 0:
        plan.error("--compute must be above 0")
    if parsed.wrapper == "ddp" and (parsed.param_dtype or parsed.no_reshard_after_forward):
        plan.error("--param-dtype and --no-reshard-after-forward are for FSDP; ddp gathers nothing")
    _check_files(parsed, plan)
    cluster = Cluster(parsed.nodes, parsed.ranks_per_node, parsed.within, parsed.between, parsed.latency)
    shards, overlap = _shards(parsed, plan), not parsed.no_overlap
    job = Job(_sized(parsed, plan), parsed.wrapper, cluster, parsed.compute, shards, overlap)
    policies = ("balanced",) if parsed.wrapper == "ddp" else tuple(dict.fromkeys(parsed.policy))
    return Options(job, policies, tuple(sorted(set(parsed.steps))), parsed.efficiency, parsed.json, parsed.plot)


def _sized(parsed: argparse.Namespace, plan: argparse.ArgumentParser) -> Model:
    if (parsed.parameters is None) == (parsed.width is None):
        plan.error("give the size of the model either by --parameters, such as 7B, or by --width (and --layers)")
    ends = 0 if parsed.width is None else 2 * parsed.vocabulary * parsed.width
    size = parsed.parameters if parsed.width is None else 12 * parsed.layers * parsed.width**2 + ends
    root = ends if parsed.root is None else parsed.root
    if not 0 < size >= root:
        plan.error(f"a model of {size:,} parameters cannot have a root unit of {root:,}: see --parameters and --root")
    gathered = parsed.dtype if parsed.param_dtype is None else parsed.param_dtype
    reduced = parsed.reduce_dtype or (parsed.dtype if parsed.wrapper == "ddp" else gathered)
    reshard = not parsed.no_reshard_after_forward
    return Model(size, root, parsed.layers, parsed.dtype, gathered, reduced, parsed.optimizer_bytes, reshard)


def _shards(parsed: argparse.Namespace, plan: argparse.ArgumentParser) -> int:
    ranks, per_node = parsed.nodes * parsed.ranks_per_node, parsed.ranks_per_node
    if parsed.wrapper != "hsdp":
        if parsed.shard is not None:
            plan.error(f"--shard is for --wrapper hsdp; {parsed.wrapper} has no second dimension")
        return 1 if parsed.wrapper == "ddp" else int(ranks)
    shards: int = parsed.shard or per_node
    if ranks % shards or (shards % per_node and per_node % shards):
        plan.error(f"--shard {shards} does not divide {ranks} ranks in whole nodes or whole parts of a node")
    return shards


def _check_files(parsed: argparse.Namespace, plan: argparse.ArgumentParser) -> None:
    if parsed.plot and (problem := plot.missing()):
        plan.error(problem)
    if parsed.plot and not parsed.plot.lower().endswith(".png"):
        plan.error(f"--plot writes a PNG: expected a name that ends in .png, got {parsed.plot!r}")
    for option, name in (("--json", parsed.json), ("--plot", parsed.plot)):
        if name and name != "-" and not os.access(Path(name).parent, os.W_OK):
            plan.error(f"{option} {name}: the folder {str(Path(name).parent)!r} does not exist or cannot be written")
