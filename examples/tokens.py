"""Train on texts of unequal lengths, on two ranks with unequal numbers of them: each micro-batch counts for its tokens.

    python examples/tokens.py

It reads lines of the Python standard library's own source. The ranks hold 31 and 26 micro-batches of eight lines, so
the last window is short, and rank 1 has run out before it. One process that sees the same windows as whole batches is
the judge; counting every micro-batch alike, as most loops do, is shown beside it.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector as vector

from accumulate import Accumulator

steps = 4  # micro-batches of a rank to an update
counts = (31, 26)  # micro-batches that each rank has in an epoch
lines_each = 8  # lines in a micro-batch
epochs = 3
width = 64  # size of the hidden state
ignored = -100  # the target of padding, which is not a token and must not count

torch.set_default_dtype(torch.float64)  # so that rounding cannot be the excuse for a difference
torch.set_num_threads(1)

# -- data: each line is one text, from 2 to 100 bytes
files = sorted(Path(os.__file__).parent.glob("*.py"))
lines = [line for file in files for line in file.read_bytes().splitlines() if 2 <= len(line) <= 100]
Batch = tuple[Tensor, Tensor]  # inputs and targets, each (lines, longest line - 1)


def pad(texts: list[bytes]) -> Batch:
    """The target of a byte is the byte after it; after the end of a line there is none."""
    x, y = (torch.full((len(texts), max(map(len, texts)) - 1), fill) for fill in (0, ignored))
    for row, line in enumerate(map(list, texts)):
        x[row, : len(line) - 1], y[row, : len(line) - 1] = torch.tensor(line[:-1]), torch.tensor(line[1:])
    return x, y


def texts_of(rank: int) -> list[list[bytes]]:
    """The micro-batches of a rank, before padding."""
    draw = torch.Generator().manual_seed(rank)
    chosen = torch.randint(len(lines), (counts[rank], lines_each), generator=draw).tolist()
    return [[lines[i] for i in each] for each in chosen]


def tokens(batch: Batch) -> Tensor:
    """What a micro-batch counts for; a tensor, which is never read by the host."""
    return (batch[1] != ignored).sum()


class Model(nn.Module):
    """A recurrent network that predicts each byte of a line from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(256, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (lines, bytes) to the logits of the byte after each: (lines, 256, bytes)."""
        logits: Tensor = self.head(self.cell(self.embed(x))[0])
        return logits.transpose(1, 2)


def train(model: nn.Module, steps: int, batches: list[Batch], weighted: bool) -> float:
    """Train on these batches; a mean over tokens is what the loss is, so its weight is the number of tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = Accumulator(model, steps)
    for _ in range(epochs):
        for batch in acc.batches(batches, weight=tokens if weighted else None):
            with acc.step():
                loss = F.cross_entropy(model(batch[0]), batch[1], ignore_index=ignored)
                acc.backward(loss, weight=tokens(batch) if weighted else None)
            acc.optimizer_step(optimizer, max_norm=1.0)  # does nothing until the window is full, or the data ends
    last = acc.global_loss()
    assert last is not None
    return float(last)


def main(rank: int, folder: str) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    trained = []
    for weighted in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(Model())
        loss = train(model, steps, [pad(texts) for texts in texts_of(rank)], weighted)
        trained.append(vector(model.parameters()).detach())
        if rank == 0:
            print(
                f"two ranks, {'by tokens' if weighted else 'all alike'}: last loss of both ranks {loss:.4f}", flush=True
            )
    dist.destroy_process_group()
    if rank == 0:
        compare(*trained)


def compare(ours: Tensor, alike: Tensor) -> None:
    """One process, one whole batch to an update: the lines of a window of both ranks."""
    torch.manual_seed(0)
    model = Model()
    start = vector(model.parameters()).detach().clone()
    every = [texts_of(0), texts_of(1)]
    windows = [
        [t for mine in every for texts in mine[i : i + steps] for t in texts] for i in range(0, counts[0], steps)
    ]
    train(model, 1, [pad(texts) for texts in windows], weighted=True)
    whole = vector(model.parameters()).detach()
    error, mistake = (float((each - whole).norm() / (whole - start).norm()) for each in (ours, alike))
    print(f"difference from whole batches, relative to how far the weights moved: {error:.1e} weighted by tokens,")
    print(f"{mistake:.1e} when every micro-batch counts alike")
    sys.exit(None if error < 1e-9 else "that is more than rounding")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(main, args=(folder,), nprocs=2)  # type: ignore[no-untyped-call]  # torch has no types for it
