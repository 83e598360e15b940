"""Real data that needs no download: handwritten digits, or the Python standard library's own source."""

from __future__ import annotations

import importlib
import importlib.util
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Data:
    """``sequences``: (count, tokens), int64, in a fixed random order."""

    sequences: Tensor
    vocabulary: int
    name: str


def available() -> str:
    """``digits`` if scikit-learn is installed (it brings them along), else ``source``."""
    return "digits" if importlib.util.find_spec("sklearn") else "source"


def load(name: str, tokens: int) -> Data:
    """Cut ``name``'s stream of tokens into sequences.

    Raises:
        ValueError: the stream is shorter than one sequence.
    """
    stream, vocabulary, title = _digits() if name == "digits" else _source()
    count = len(stream) // tokens
    if count == 0:
        raise ValueError(f"--tokens {tokens} is more than the {len(stream)} tokens of {title}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    sequences = stream[: count * tokens].view(count, tokens)[order].long()
    return Data(sequences, vocabulary, title)


def _digits() -> tuple[Tensor, int, str]:
    """8x8 images of digits, one token a pixel: ink or no ink."""
    digits = importlib.import_module("sklearn.datasets").load_digits()
    pixels = torch.from_numpy(digits.data)  # 1,797 rows of 64 pixels, each 0 to 16
    return (pixels >= 8).to(torch.uint8).flatten(), 2, "scikit-learn's handwritten digits, binarised"


def _source(limit: int = 2**20) -> tuple[Tensor, int, str]:
    """The first MiB of the standard library's modules, one token a byte."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8), 256, "source of the Python standard library"
