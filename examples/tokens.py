"""Train on texts of unequal lengths, where a micro-batch must count for its tokens and not for one.

    python examples/tokens.py

It reads lines of the Python standard library's own source, in micro-batches of eight lines, and trains three times:
each micro-batch weighted by its tokens, the whole batch at once, and every micro-batch alike. The first two agree.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as vector

from accumulate import Accumulator

updates = 30  # optimizer steps
batch = 32  # lines in one update
steps = 4  # micro-batches in one update, so each holds 32 / 4 = 8 lines
width = 64  # size of the hidden state
ignored = -100  # the target of padding, which is not a token and must not count

torch.set_default_dtype(torch.float64)  # so that rounding cannot be the excuse for a difference
torch.set_num_threads(1)  # more would only get in each other's way in a model of this size

# -- data: each line is one text, from 2 to 100 bytes
files = sorted(Path(os.__file__).parent.glob("*.py"))
lines = [line for file in files for line in file.read_bytes().splitlines() if 2 <= len(line) <= 100]


def get_batch(update: int) -> list[bytes]:
    """The lines of one update, the same whenever they are asked for."""
    draw = torch.Generator().manual_seed(update)
    return [lines[i] for i in torch.randint(len(lines), (batch,), generator=draw).tolist()]


def pad(texts: list[bytes]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (texts, longest text - 1); the target of a byte is the byte after it."""
    x, y = (torch.full((len(texts), max(map(len, texts)) - 1), fill) for fill in (0, ignored))
    for row, line in enumerate(map(list, texts)):
        x[row, : len(line) - 1], y[row, : len(line) - 1] = torch.tensor(line[:-1]), torch.tensor(line[1:])
    return x, y


# -- model: a recurrent network
class Model(nn.Module):
    """Predicts each byte of a line from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(256, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (lines, bytes) to the logits of the byte after each: (lines, 256, bytes)."""
        logits: Tensor = self.head(self.cell(self.embed(x))[0])
        return logits.transpose(1, 2)


def train(steps: int, weighted: bool) -> Tensor:
    """Train with this many micro-batches to an update; returns all weights in one vector."""
    torch.manual_seed(0)
    model = Model()
    start = vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = Accumulator(model, steps)
    for update in range(updates):
        texts, size = get_batch(update), batch // steps
        for first in range(0, batch, size):
            x, y = pad(texts[first : first + size])
            tokens = (y != ignored).sum()  # a tensor: nothing has to be read from the device
            with acc.step():
                loss = F.cross_entropy(model(x), y, ignore_index=ignored)  # a mean over the tokens
                acc.backward(loss, weight=tokens if weighted else None)
            acc.optimizer_step(optimizer, max_norm=1.0)  # does nothing until the window is full
    print(f"{steps} micro-batches, {'by tokens' if weighted else 'all alike'}: last loss {acc.loss:.4f}")
    return vector(model.parameters()).detach() - start


ours, whole, alike = train(steps, weighted=True), train(1, weighted=True), train(steps, weighted=False)
error, mistake = (float((each - whole).norm() / whole.norm()) for each in (ours, alike))
print(f"difference from the whole batch, relative to how far the weights moved: {error:.1e} weighted by tokens,")
print(f"{mistake:.1e} when every micro-batch counts alike")
sys.exit(None if error < 1e-9 else "that is more than rounding")
