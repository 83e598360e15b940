"""Save in the middle of a window, be killed, and go on in new processes as if nothing had happened.

    python examples/resume.py

The script starts both ranks itself, on this machine's CPU. They train a small language model on the source of the
Python standard library, write a checkpoint every 5 micro-batches although a window has 4, and kill themselves after one
of them. New processes load it and finish. At the end the weights are, bit for bit, those of a run that nobody killed.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, spawn
from torch.nn.parallel import DistributedDataParallel

from accumulate import Accumulator

ranks = 2  # processes that share the work
steps = 4  # micro-batches in one update
total = 40  # micro-batches on each rank, so 10 updates
save_every = 5  # micro-batches
killed_after = 30  # micro-batches: 7 whole windows, and half of the eighth
size = 8  # samples in a micro-batch
length = 32  # bytes that the model sees before the one it predicts

torch.set_num_threads(1)  # the ranks share this machine's cores

# -- data: each byte is one token
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def get_microbatch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    """The samples of one micro-batch, the same whenever they are asked for: (size, length) bytes, and the next byte."""
    starts = torch.randint(len(text) - length, (size, 1), generator=torch.Generator().manual_seed(index * ranks + rank))
    return text[starts + torch.arange(length)], text[starts[:, 0] + length]


def build() -> nn.Sequential:
    """A small network that predicts the next byte; the same weights in every process."""
    torch.manual_seed(0)
    embed = nn.Sequential(nn.Embedding(256, 16), nn.Flatten())  # (size, length * 16)
    return nn.Sequential(embed, nn.Linear(length * 16, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256))


def main(rank: int, folder: str, killed_after: int) -> None:
    """What each rank runs: it goes on from its checkpoint, if there is one."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    acc = Accumulator(model, steps)
    checkpoint = Path(folder) / f"rank{rank}.pt"  # one for each rank: half a window is different on each
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        acc.load_state_dict(saved["accumulator"])
        torch.set_rng_state(saved["random"])  # for dropout
        print(f"  rank {rank} goes on at micro-batch {acc.position + 1} of window {acc.updates + 1}", flush=True)
    for index in range(acc.micro_steps, total):
        x, y = get_microbatch(index, rank)
        with acc.step():
            acc.backward(F.cross_entropy(model(x), y))
        acc.optimizer_step(optimizer, max_norm=1.0)  # does nothing until the window is full
        if acc.micro_steps % save_every == 0:
            everything = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "accumulator": acc.state_dict(),  # in mid-window: this rank's partial gradients as well
                "random": torch.get_rng_state(),
            }
            torch.save(everything, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)  # so that there is always a whole one
        if acc.micro_steps == killed_after:
            dist.barrier()  # both have saved
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"  rank {rank} is done: last loss {acc.loss:.4f}", flush=True)
    dist.destroy_process_group()


def run(folder: str, killed_after: int = 0) -> dict[str, Tensor]:
    """Both ranks, in new processes; returns the weights at the end."""
    Path(folder, "meeting").unlink(missing_ok=True)
    spawn(main, args=(folder, killed_after), nprocs=ranks)  # type: ignore[no-untyped-call]  # torch has no types for it
    weights: dict[str, Tensor] = torch.load(f"{folder}/rank0.pt", weights_only=True)["model"]
    return weights


if __name__ == "__main__":
    print(f"{ranks} ranks, {steps} micro-batches to an update; killed after {killed_after} micro-batches of {total}")
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as others:
        try:
            run(ours, killed_after)
        except ProcessExitedException as error:
            print(f"  {error}")
        print("new processes")
        resumed = run(ours)
        print("and once more without an interruption")
        whole = run(others)
    different = [name for name in whole if not torch.equal(resumed[name], whole[name])]
    print(f"tensors that differ by at least one bit: {len(different)} of {len(whole)}")
    sys.exit(f"these should be equal: {', '.join(different)}" if different else None)
