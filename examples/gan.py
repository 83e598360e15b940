"""Train a generator and a discriminator in one loop, with windows of two and of four micro-batches.

    python examples/gan.py

Each has an accumulator of its own, and neither disturbs the other. The data are lines of the Python standard library's
own source, seen as points: how far a line is indented, and how long it is. It ends by comparing both models with the
same training by hand, in which every window is one big batch.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as vector

from accumulate import Accumulator

rounds = 100  # updates of the discriminator; the generator has twice as many
gen_steps, disc_steps = 2, 4  # micro-batches in one update of each
size = 16  # samples in one micro-batch
width = 32  # size of the hidden layers

torch.set_default_dtype(torch.float64)  # so that rounding cannot be the excuse for a difference at the end
torch.set_num_threads(1)  # more would only get in each other's way in models of this size

# -- data: one point for each line
files = sorted(Path(os.__file__).parent.glob("*.py"))
lines = [line for file in files for line in file.read_bytes().splitlines() if line.strip()]
points = torch.tensor([[len(line) - len(line.lstrip()), len(line)] for line in lines], dtype=torch.float64)
points = (points - points.mean(0)) / points.std(0)


def get_data(index: int) -> tuple[Tensor, Tensor]:
    """The points and the noise of one micro-batch, the same whenever they are asked for: (size, 2) each."""
    draw = torch.Generator().manual_seed(index)
    return points[torch.randint(len(points), (size,), generator=draw)], torch.randn(size, 2, generator=draw)


def build() -> tuple[nn.Module, nn.Module]:
    """Generator, from noise to points, and discriminator, from points to how real they look."""
    torch.manual_seed(0)
    gen = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, 2))
    return gen, nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, 1))


def optimizers(gen: nn.Module, disc: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """One for each."""
    return torch.optim.Adam(gen.parameters(), lr=1e-3), torch.optim.Adam(disc.parameters(), lr=1e-3)


def gen_loss(disc: nn.Module, fake: Tensor) -> Tensor:
    """Small if the discriminator takes the fakes for real."""
    return F.softplus(-disc(fake)).mean()


def disc_loss(disc: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Small if the discriminator tells the two apart."""
    return F.softplus(-disc(real)).mean() + F.softplus(disc(fake)).mean()


def train(gen: nn.Module, disc: nn.Module) -> None:
    """In micro-batches: both models see each of them."""
    gen_optimizer, disc_optimizer = optimizers(gen, disc)
    gen_acc, disc_acc = Accumulator(gen, gen_steps), Accumulator(disc, disc_steps)
    for index in range(rounds * disc_steps):
        real, noise = get_data(index)
        fake = gen(noise)
        with disc_acc.step():
            disc_acc.backward(disc_loss(disc, real, fake.detach()))
        disc.requires_grad_(False)  # the generator learns through it, and must leave nothing in its gradients
        with gen_acc.step():
            gen_acc.backward(gen_loss(disc, fake))
        disc.requires_grad_(True)
        gen_acc.optimizer_step(gen_optimizer)  # each does nothing until its own window is full
        disc_acc.optimizer_step(disc_optimizer)
        if disc_acc.updates % 25 == 0 and disc_acc.is_boundary:
            losses = f"generator {gen_acc.loss:.3f}, discriminator {disc_acc.loss:.3f}"
            print(f"  {gen_acc.updates} and {disc_acc.updates} updates: {losses}")


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One ordinary step of one model."""
    optimizer.zero_grad()
    loss.backward(inputs=[*model.parameters()])  # type: ignore[no-untyped-call]  # torch has no types for it
    optimizer.step()


def train_whole(gen: nn.Module, disc: nn.Module) -> None:
    """By hand, with each window as one batch."""
    gen_optimizer, disc_optimizer = optimizers(gen, disc)
    for first in range(0, rounds * disc_steps, disc_steps):
        window = [get_data(index) for index in range(first, first + disc_steps)]
        fakes = []
        for half in range(0, disc_steps, gen_steps):
            fake = gen(torch.cat([noise for _, noise in window[half : half + gen_steps]]))
            fakes.append(fake.detach())
            update(gen, gen_optimizer, gen_loss(disc, fake))
        update(disc, disc_optimizer, disc_loss(disc, torch.cat([real for real, _ in window]), torch.cat(fakes)))


print(f"micro-batches of {size}, {gen_steps} to an update of the generator, {disc_steps} of the discriminator")
ours, whole = build(), build()
train(*ours)
train_whole(*whole)
for name, start, mine, reference in zip(("generator", "discriminator"), build(), ours, whole, strict=True):
    a, b, c = (vector(model.parameters()).detach() for model in (start, mine, reference))
    error = float((b - c).norm() / (c - a).norm())
    print(f"difference from big batches, relative to how far the {name}'s weights moved: {error:.1e}")
    if not error < 1e-9:
        sys.exit("that is more than rounding")
