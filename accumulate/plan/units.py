"""Sizes as people write them: 7B parameters, 400 Gbit/s, 350 ms."""

from __future__ import annotations

import argparse
import re

__all__ = ["DTYPES", "bandwidth", "count", "dtype", "duration", "parameters", "share"]

DTYPES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)"


def _parse(pattern: str, text: str, what: str) -> re.Match[str]:
    if not (found := re.fullmatch(_NUMBER + pattern, text.strip())):
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
    return found


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parameters(text: str) -> int:
    """A number of parameters, as an integer."""
    found = _parse("([kKMBGT]?)", text, "a number of parameters such as 350M or 7B")
    return round(float(found[1]) * _PREFIXES[found[2].replace("B", "G")])


def bandwidth(text: str) -> float:
    """Bytes per second; a bandwidth without bit or B is refused, because people mean either."""
    what = "a bandwidth above 0 such as 400Gbit/s or 50GB/s (bits or bytes, in one direction)"
    found = _parse(" ?([kKMGT]?)(bit/s|bps|B/s)", text, what)
    value = float(found[1]) * _PREFIXES[found[2]] / (1 if found[3] == "B/s" else 8)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
    return value


def duration(text: str) -> float:
    """Seconds."""
    found = _parse(" ?(s|ms|us)", text, "a time such as 0.4s, 350ms or 10us")
    return float(found[1]) * _SECONDS[found[2]]


def share(text: str) -> float:
    """A number above 0 and below 1."""
    value = float(_parse("", text, "a share between 0 and 1 such as 0.95")[1])
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1 such as 0.95, got {text!r}")
    return value


def dtype(text: str) -> int:
    """Bytes of one element."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, got {text!r}")
    return DTYPES[text]
