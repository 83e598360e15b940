"""Train a small language model sharded over two ranks with fully_shard: one reduce-scatter for four micro-batches.

    python examples/fsdp2.py

The script starts both ranks itself, on this machine's CPU. It reads the source of the Python standard library, and
ends by comparing the weights with those of one process that took every batch whole.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector as vector

from accumulate import Accumulator

ranks = 2  # processes that share the work
updates = 30  # optimizer steps
batch = 64  # samples in one update, over all ranks
steps = 4  # micro-batches in one update, so each holds 64 / 2 / 4 = 8 samples
length = 32  # bytes that the model sees before the one it predicts

torch.set_default_dtype(torch.float64)  # so that rounding cannot be the excuse for a difference at the end
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
    return nn.Sequential(embed, nn.Linear(length * 16, 256), nn.GELU(), nn.Linear(256, 256))


def train(model: nn.Module, steps: int, rank: int, ranks: int) -> None:
    """Train on one rank's share of each batch, with this many micro-batches to an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = Accumulator(model, steps)
    for update in range(updates):
        x, y = (part.chunk(ranks)[rank] for part in get_batch(update))
        for micro_x, micro_y in zip(x.chunk(steps), y.chunk(steps), strict=True):
            with acc.step():  # the fourth one reduces, the others only add up
                acc.backward(F.cross_entropy(model(micro_x), micro_y))
            acc.optimizer_step(optimizer, max_norm=1.0)  # does nothing until the window is full
        if rank == 0 and update % 10 == 9:
            print(f"  update {update + 1}: rank 0's loss {acc.loss:.4f}, gradient norm {acc.grad_norm:.4f}", flush=True)


def main(rank: int, folder: str) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = build()
    for layer in (model[1], model[3], model):  # each is gathered when it is needed; the root holds the rest
        fully_shard(layer, mesh=mesh)
    train(model, steps, rank, ranks)
    ours = vector(w.full_tensor() for w in model.parameters() if isinstance(w, DTensor)).detach()  # all of them
    dist.destroy_process_group()
    if rank == 0:
        print(f"one process, one batch of {batch} samples to an update")
        reference = build()
        train(reference, steps=1, rank=0, ranks=1)
        start, whole = (vector(m.parameters()).detach() for m in (build(), reference))
        error = float((ours - whole).norm() / (whole - start).norm())
        print(f"difference between the two, relative to how far the weights moved: {error:.1e}")
        sys.exit(None if error < 1e-9 else "that is more than rounding")


if __name__ == "__main__":
    print(f"{ranks} ranks, {steps} micro-batches of {batch // ranks // steps} samples to an update")
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(folder,), nprocs=ranks)  # type: ignore[no-untyped-call]  # torch has no types for it
