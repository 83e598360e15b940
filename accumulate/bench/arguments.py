"""The arguments of ``python -m accumulate bench``: what they mean, and which are refused."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from accumulate._arguments import POLICIES
from accumulate.bench import data, plot
from accumulate.bench.cores import cores
from accumulate.bench.plan import Options

ABOUT = """\
Does gradient accumulation keep your processes busy? Measured on this machine, on real data.

A small GPT is trained by 1 process, and by N processes that
  reduce on every micro-batch       what a loop does if nobody stops the wrapper,
  reduce once, hand-written         no_sync (DDP) or set_requires_gradient_sync (FSDP2),
  reduce once, accumulate           this library,
  reduce nothing                    independent models: the ceiling that shared caches and memory allow,
for each number of micro-batches per window (--steps), in interleaved rounds. The ranks are started here:
on NCCL with one GPU each where there are two or more GPUs, else on gloo with one core and one thread each.
"""
EXAMPLES = """\
examples:
  python -m accumulate bench                          the table, in less than three minutes
  python -m accumulate bench --wrapper fsdp2          the same under fully_shard
  python -m accumulate bench --wrapper fsdp2 --policy speed    with parameters gathered once per window
  python -m accumulate bench --plot efficiency.png    efficiency over steps as a picture
  python -m accumulate bench --json - | jq .results   for programs; progress and table go to stderr
  python -m accumulate bench --batch 8 --rounds 5     more work per micro-batch: reducing matters less

exit status: 0 done, 1 a rank failed, 2 bad arguments, 130 interrupted
"""


def declare(bench: argparse.ArgumentParser) -> None:
    """Add the arguments, and a help text that says what is compared."""
    bench.description, bench.epilog = ABOUT, EXAMPLES
    bench.formatter_class = argparse.RawDescriptionHelpFormatter
    _what(bench.add_argument_group("what to compare"))
    _model(bench.add_argument_group("model and data"))
    _output(bench.add_argument_group("output"))


def _what(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--wrapper",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="around the model of the N processes (default: ddp)",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default="balanced",
        help="what accumulate's fsdp2 keeps between micro-batches (default: balanced)",
    )
    group.add_argument(
        "--ranks",
        type=_count,
        metavar="N",
        help="processes (default: one per GPU, else 2, else 1 on a single core)",
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there are two GPUs or more, else cpu"
    )
    group.add_argument(
        "--steps",
        type=_count,
        nargs="+",
        default=[1, 4, 8, 32],
        metavar="N",
        help="micro-batches per window (default: 1 4 8 32)",
    )
    group.add_argument("--rounds", type=_count, metavar="N", help="default: as many as fit in --seconds, 5 at most")
    group.add_argument(
        "--seconds", type=_seconds, default=150.0, metavar="S", help="time to fill with rounds (default: 150)"
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="give up if a rank is silent for this long (default: 300)",
    )


def _model(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("layers", 6, "transformer blocks"),
        ("width", 512, "size of the residual stream, a multiple of --heads"),
        ("heads", 8, "attention heads"),
        ("tokens", 64, "length of a sequence; one image has 64 pixels"),
        ("batch", 1, "sequences per micro-batch"),
    ):
        group.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{text} (default: {default})")
    group.add_argument(
        "--data",
        choices=("digits", "source"),
        help="scikit-learn's handwritten digits, or bytes of Python's own source (default: digits if there)",
    )


def _output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json",
        metavar="FILE",
        help="write the result as JSON; - is stdout, and the table then goes to stderr",
    )
    group.add_argument(
        "--plot", metavar="FILE.png", help="draw efficiency over steps (needs matplotlib: the bench extra)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def options(parsed: argparse.Namespace, bench: argparse.ArgumentParser) -> Options:
    """The checked settings; a bad one, alone or against the others or the machine, ends by ``bench.error``."""
    if parsed.width % parsed.heads:
        bench.error(f"--width {parsed.width} is not a multiple of --heads {parsed.heads}")
    if parsed.plot and (problem := plot.missing()):
        bench.error(problem)
    if parsed.plot and not parsed.plot.lower().endswith(".png"):
        bench.error(f"--plot writes a PNG: expected a name that ends in .png, got {parsed.plot!r}")
    for option, name in (("--json", parsed.json), ("--plot", parsed.plot)):
        if name and name != "-" and not os.access(Path(name).parent, os.W_OK):
            bench.error(f"{option} {name}: the folder {str(Path(name).parent)!r} does not exist or cannot be written")
    source = parsed.data or data.available()
    if source == "digits" and data.available() != "digits":
        bench.error(f"--data digits needs scikit-learn, which is not installed: {plot.INSTALL}, or use --data source")
    try:
        data.load(source, parsed.tokens)
    except ValueError as error:
        bench.error(str(error))
    device, ranks = _place(parsed, bench)
    names = ("wrapper", "policy", "rounds", "seconds", "timeout", "layers", "width", "heads", "tokens", "batch")
    given = {name: getattr(parsed, name) for name in names}
    return Options(ranks=ranks, device=device, data=source, steps=sorted(set(parsed.steps)), **given)


def _place(parsed: argparse.Namespace, bench: argparse.ArgumentParser) -> tuple[str, int]:
    if not torch.distributed.is_available():
        bench.error("this build of torch has no torch.distributed, so there are no ranks to compare")
    gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    device = parsed.device or ("cuda" if gpus > 1 else "cpu")
    if device == "cuda" and gpus < (parsed.ranks or 1):
        bench.error(f"--ranks {parsed.ranks or 1} on cuda needs one GPU each and NCCL, found {gpus}: use --device cpu")
    return device, parsed.ranks or (gpus if device == "cuda" else min(2, len(cores())))
