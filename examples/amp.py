"""Train in float16 on two ranks, where an overflow on one of them must skip the update on both.

    python examples/amp.py

The script starts both ranks itself, on this machine's CPU (on GPUs, write "cuda" for "cpu" and "nccl" for "gloo"). The
scaler begins with a factor that is far too large, as GradScalers do, and finds the right one by skipping updates. Later
one micro-batch of one rank has an infinite loss. It ends by comparing the weights with those of one process in
float32 that took every batch whole, except the skipped ones.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector as vector

from accumulate import Accumulator

ranks = 2  # processes that share the work
updates = 30  # windows, so optimizer steps but for those that are skipped
batch = 64  # samples in one update, over all ranks
steps = 4  # micro-batches in one update, so each holds 64 / 2 / 4 = 8 samples
length = 16  # bytes that the model sees before the one it predicts
spoilt = 20  # the update in which one loss is infinite

torch.set_num_threads(1)  # the ranks share this machine's cores

# -- data: each byte is one token
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def get_batch(update: int) -> tuple[Tensor, Tensor]:
    """The samples of one update, the same on every rank: (batch, length) bytes, and the byte after each row."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=torch.Generator().manual_seed(update))
    return text[starts + torch.arange(length)], text[starts[:, 0] + length]


def build() -> nn.Sequential:
    """A small network that predicts the next byte; the same weights in every process."""
    torch.manual_seed(0)
    embed = nn.Sequential(nn.Embedding(256, 16), nn.Flatten())  # (batch, length * 16)
    return nn.Sequential(embed, nn.Linear(length * 16, 128), nn.GELU(), nn.Linear(128, 256))


def train(model: nn.Module, rank: int) -> list[int]:
    """Train on one rank's share of each batch, in float16; returns the updates that the scaler skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    scaler = GradScaler("cpu", init_scale=2.0**22)
    acc = Accumulator(model, steps, scaler=scaler)
    skipped = []
    for update in range(updates):
        x, y = (part.chunk(ranks)[rank] for part in get_batch(update))
        for index, (micro_x, micro_y) in enumerate(zip(x.chunk(steps), y.chunk(steps), strict=True)):
            with acc.step(), torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(micro_x), micro_y)
                if (update, rank, index) == (spoilt, 1, 1):
                    loss = loss * torch.inf  # on one rank, and not in the micro-batch that reduces
                acc.backward(loss)  # multiplies by the scaler's factor
            taken = acc.optimizer_step(optimizer, max_norm=1.0, schedulers=[scheduler])
        if not taken:
            skipped.append(update)
        if rank == 0 and update % 10 == 9:
            print(f"  update {update + 1}: loss {acc.loss:.3f}, factor {scaler.get_scale():.0f}", flush=True)
    return skipped


def train_whole(model: nn.Module, skipped: list[int]) -> None:
    """The same by hand in float32, each batch whole, without the updates that were skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    for update in range(updates):
        if update not in skipped:
            x, y = get_batch(update)
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def main(rank: int, folder: str) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = build()
    skipped = train(DistributedDataParallel(model), rank)
    every: list[tuple[list[int], Tensor]] = [([], torch.empty(0))] * ranks
    dist.all_gather_object(every, (skipped, vector(model.parameters()).detach()))
    dist.destroy_process_group()
    if rank == 0:
        print(f"updates skipped on each rank: {[theirs for theirs, _ in every]}")
        if any(theirs != skipped or not torch.equal(weights, every[0][1]) for theirs, weights in every):
            sys.exit("the ranks differ")
        if len(skipped) < 2 or skipped[-1] != spoilt:
            sys.exit("the first updates and the spoilt one should have been skipped")
        reference = build()
        train_whole(reference, skipped)
        start, ours, whole = (vector(m.parameters()).detach() for m in (build(), model, reference))
        error = float((ours - whole).norm() / (whole - start).norm())
        print(f"difference from float32, relative to how far the weights moved: {error:.1e}")
        sys.exit(None if error < 1e-2 else "that is more than float16's rounding")


if __name__ == "__main__":
    print(f"{ranks} ranks in float16, {steps} micro-batches of {batch // ranks // steps} samples to an update")
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(folder,), nprocs=ranks)  # type: ignore[no-untyped-call]  # torch has no types for it
