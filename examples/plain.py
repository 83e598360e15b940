"""Train a small language model on one device, with four micro-batches to each update.

    python examples/plain.py

It reads the source of the Python standard library, once in micro-batches and once in batches of the full size,
and ends by comparing the two: the same weights, with a quarter of the activations in memory.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from accumulate import Accumulator

updates = 20  # optimizer steps
batch = 32  # sequences in one update
steps = 4  # micro-batches in one update, so each holds 32 / 4 = 8 sequences
length = 64  # bytes in one sequence
width = 64  # size of the residual stream

torch.set_default_dtype(torch.float64)  # so that rounding cannot be the excuse for a difference at the end
torch.set_num_threads(1)  # more would only get in each other's way in a model of this size

# -- data: each byte is one token, and the target is the byte after it
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def get_batch(update: int) -> tuple[Tensor, Tensor]:
    """The sequences of one update, the same whenever it is asked for."""
    draw = torch.Generator().manual_seed(update)
    starts = torch.randint(len(text) - length - 1, (batch, 1), generator=draw)
    at = starts + torch.arange(length)  # (batch, length): where each token lies in the text
    return text[at], text[at + 1]


# -- model: two transformer layers
class Model(nn.Module):
    """A GPT as small as it can be: every position predicts the byte that comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the byte that follows each byte of ``x``."""
        causal = nn.Transformer.generate_square_subsequent_mask(length)  # nobody sees the future
        hidden = self.bytes(x) + self.places.weight
        logits: Tensor = self.head(self.layers(hidden, mask=causal, is_causal=True))
        return logits


# -- training: `steps` is the only difference between the two runs
def train(model: Model, steps: int) -> Tensor:
    """Train with this many micro-batches to an update; returns all weights in one vector."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    acc = Accumulator(model, steps)
    for update in range(updates):
        x, y = get_batch(update)
        for micro_x, micro_y in zip(x.chunk(steps), y.chunk(steps), strict=True):
            with acc.step():
                logits = model(micro_x)
                acc.backward(F.cross_entropy(logits.flatten(0, 1), micro_y.flatten()))
            acc.optimizer_step(optimizer, max_norm=1.0)  # does nothing until the window is full
        if update % 10 == 9:
            print(f"  update {update + 1}: loss {acc.loss:.4f}, gradient norm {acc.grad_norm:.4f}")
    return parameters_to_vector(model.parameters()).detach()


torch.manual_seed(0)
start = Model()  # both runs begin here
print(f"{steps} micro-batches of {batch // steps} sequences to an update")
ours = train(copy.deepcopy(start), steps)
print(f"one batch of {batch} sequences to an update")
whole = train(copy.deepcopy(start), 1)

moved = whole - parameters_to_vector(start.parameters()).detach()
error = float((ours - whole).norm() / moved.norm())
print(f"difference between the two, relative to how far the weights moved: {error:.1e}")
sys.exit(None if error < 1e-9 else "that is more than rounding")
