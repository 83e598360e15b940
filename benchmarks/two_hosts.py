"""Two hosts on this machine: network namespaces joined by a link of a given rate, and the bench over it by torchrun.

    sudo python benchmarks/two_hosts.py                                  1 Gbit/s and 100 Mbit/s, DDP
    sudo python benchmarks/two_hosts.py --rates 1Gbit/s --steps 1 8 32   another link, other windows
    sudo python benchmarks/two_hosts.py --wrapper fsdp2 --json out.json

For each rate and number of micro-batches per window: the efficiency of a loop that reduces each, of hand-written code
and of accumulate, against the same ranks reducing nothing in the same round; what `python -m accumulate plan` predicts
from the time they took for that; and the bytes that crossed the link. Needs root and Linux's iproute2; the namespaces
are removed again, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from accumulate.bench.plan import ACCUMULATE, EVERY, HAND, SILENT, Mode, Options
from accumulate.plan import units
from accumulate.plan.cost import Cluster, Forecast, Job, forecast
from accumulate.plan.volume import EACH, Model

HERE = Path(__file__).parent
ADDRESSES = ("10.213.87.1", "10.213.87.2")
PORT = 29533


class LinkError(Exception):
    """The link cannot be made here; the message says what to do."""


# -- the link ---------------------------------------------------------------------------------------------------------


def sh(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def refuse_elsewhere() -> None:
    if not sys.platform.startswith("linux"):
        raise LinkError("network namespaces are Linux's; run this in a Linux machine or container")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise LinkError(
            f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2, dnf install iproute-tc)"
        )
    if os.geteuid():
        raise LinkError("making network namespaces needs root: sudo python benchmarks/two_hosts.py")


@contextmanager
def hosts(rate: float) -> Iterator[list[str]]:
    """Two namespaces with one address each, joined by a link of ``rate`` bytes per second in each direction."""
    names = [f"accumulate-{os.getpid()}-{index}" for index in range(2)]
    ends = [f"acc{os.getpid()}.{index}" for index in range(2)]  # an interface's name has at most 15 characters
    with ExitStack() as stack:
        for name in names:
            # Registered first, so that no moment is left in which an interruption would leave one behind.
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
            sh("ip", "netns", "add", name)
        sh("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            sh(*inside, "addr", "add", f"{address}/24", "dev", end)
            sh(*inside, "link", "set", "lo", "up")
            sh(*inside, "link", "set", end, "up")
            limit = ("rate", f"{rate * 8:.0f}bit", "burst", "128kb", "latency", "100ms")
            sh("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit)
        yield names


# -- torchrun on both -------------------------------------------------------------------------------------------------


@contextmanager
def started(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, all of which is ended when the block is left."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    continue


def run(names: Sequence[str], options: Options, timeout: float) -> dict[str, Any]:
    """What the ranks found: ``torchrun`` once on each host, as on a real cluster."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accumulate-hosts-")))
        result, logs = folder / "result.json", [folder / f"host{index}.log" for index in range(2)]
        processes = []
        for index, name in enumerate(names):
            interface = f"acc{os.getpid()}.{index}"
            given = {"options": vars(options), "interface": interface, "result": str(result)}
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            command += [f"--node-rank={index}", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
            command += ["--nproc-per-node=1", str(HERE / "two_hosts_rank.py"), json.dumps(given)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            processes.append(stack.enter_context(started(command, environment, logs[index])))
        codes = [process.wait(timeout) for process in processes]
        if any(codes) or not result.exists():
            ends = "\n".join(f"--- host {i} ---\n{log.read_text()[-3000:]}" for i, log in enumerate(logs))
            raise LinkError(f"torchrun ended with {codes}\n{ends}")
        found: dict[str, Any] = json.loads(result.read_text())
    return found


# -- what came out ----------------------------------------------------------------------------------------------------


def predicted(options: Options, parameters: int, rate: float, steps: int, compute: float, each: bool) -> Forecast:
    """The plan for two nodes of one rank."""
    model = Model(parameters, layers=options.layers)
    cluster = Cluster(nodes=2, ranks_per_node=1, within=math.inf, between=rate)
    shards = 1 if options.wrapper == "ddp" else 2
    overlap = options.wrapper == "ddp"  # FSDP has no streams on a CPU, so its collectives wait for each other
    job = Job(model, options.wrapper, cluster, compute, shards, overlap)
    return forecast(job, EACH if each else "balanced", steps)


def column(found: dict[str, Any], mode: Mode, steps: int, what: str) -> list[float]:
    """One number for each round."""
    return [one[what] for one in found["samples"][f"{mode.name} {steps}"]]


def rows(options: Options, found: dict[str, Any], rate: float) -> Iterator[dict[str, Any]]:
    for steps in options.steps:
        silent = column(found, SILENT, steps, "seconds")
        for mode in (EVERY, HAND, ACCUMULATE):
            size, each = found["parameters"], mode == EVERY
            plans = [predicted(options, size, rate, steps, one / steps, each) for one in silent]
            seconds = column(found, mode, steps, "seconds")
            yield {
                "rate": rate,
                "steps": steps,
                "mode": mode.name,
                "measured": median(one / other for one, other in zip(silent, seconds, strict=True)),
                "predicted": median(plan.efficiency for plan in plans),
                "bytes": median(column(found, mode, steps, "bytes")),
                "predicted_bytes": sum(plans[0].sent),
                "seconds": seconds,
                "silent_seconds": silent,
            }


def show(row: dict[str, Any]) -> str:
    measured, expected = row["measured"], row["predicted"]
    loop = f"{row['rate'] * 8e-6:>7.0f} {row['steps']:>5}  {row['mode']:<13}"
    sent = f"{row['bytes'] / 1e6:>9.2f} {row['predicted_bytes'] / 1e6:>9.2f}"
    return f"{loop} {measured:>8.1%} {expected:>9.1%} {100 * (expected - measured):>+6.1f} {sent}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rates", type=units.bandwidth, nargs="+", default=[1.25e8, 1.25e7], metavar="RATE", help="of the link")
    add("--steps", type=units.count, nargs="+", default=[1, 4, 8], metavar="N", help="micro-batches per window")
    add("--rounds", type=units.count, default=5, metavar="N", help="interleaved; medians are shown (default: 5)")
    add("--wrapper", choices=("ddp", "fsdp2"), default="ddp", help="default: ddp")
    add("--layers", type=units.count, default=4, metavar="N", help="of the GPT (default: 4)")
    add("--width", type=units.count, default=256, metavar="N", help="a multiple of 8 (default: 256)")
    add("--batch", type=units.count, default=4, metavar="N", help="sequences per micro-batch (default: 4)")
    add("--timeout", type=float, default=900.0, metavar="S", help="seconds for one rate (default: 900)")
    add("--json", metavar="FILE", help="write the rows")
    return parser.parse_args()


def interrupted(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # a second one would only spoil the clearing up
    raise KeyboardInterrupt


def main() -> int:
    given = arguments()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupted)
    sizes = {name: getattr(given, name) for name in ("wrapper", "rounds", "layers", "width", "batch")}
    options = Options(steps=tuple(sorted(set(given.steps))), data="source", **sizes)
    found: list[dict[str, Any]] = []
    try:
        refuse_elsewhere()
        print("Mbit/s steps  mode          measured predicted  error   MB sent predicted", flush=True)
        for rate in given.rates:
            with hosts(rate) as names:
                found += rows(options, run(names, options, given.timeout), rate)
            for row in found[-3 * len(options.steps) :]:
                print(show(row), flush=True)
    except (LinkError, subprocess.TimeoutExpired) as error:
        print(f"two_hosts.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("two_hosts.py: interrupted; both hosts are gone", file=sys.stderr)
        return 130
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
