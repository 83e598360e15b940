"""Random numbers: kept for the user, seeded for each run, and replaced by constants where they hide everything else."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Constants", "RandomState"]


class RandomState:
    """The random numbers of this process and of the devices in use: torch's, Python's and numpy's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._generators = [torch.default_generator]
        for device in sorted({(d.type, d.index or 0) for d in devices}):
            of_type = getattr(getattr(torch, device[0], None), "default_generators", ())  # CPUs and MPS have none
            self._generators += of_type[device[1] : device[1] + 1]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is drawn inside, the numbers after the block are those that would have come without it."""
        numpy = sys.modules.get("numpy")
        states = [generator.get_state() for generator in self._generators]
        python, others = random.getstate(), numpy.random.get_state() if numpy else None
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            if numpy:
                numpy.random.set_state(others)

    def seed(self, seed: int) -> None:
        """Begin a run: the same seed gives the same numbers."""
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed)


_HALF = frozenset(
    ["rand", "rand_like", "randn", "randn_like", "normal", "normal_", "exponential_", "log_normal_", "cauchy_"]
)
_MASKS = frozenset(["bernoulli", "bernoulli_"])
_MIDDLE = frozenset(["uniform_", "randint", "randint_like", "random_"])


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base
    """Replaces what torch draws by constants: dropout keeps everything, and noise is one number.

    A dropout mask has the batch's shape, so equal seeds give a micro-batch another mask than its rows have in the big
    batch. Without random numbers, and with train mode left alone, what else is wrong shows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        run: Callable[..., Any] = func
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return run(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if name == "native_dropout":  # dropout as CUDA has it
            scale = 1.0 / (1.0 - args[1]) if args[1] < 1 else 0.0
            return args[0] * scale, torch.ones_like(args[0], dtype=torch.bool)
        positions = {argument.name: index for index, argument in enumerate(func._schema.arguments)}
        index = positions.get("dropout_p", positions.get("dropout", len(args)))
        if index < len(args):  # attention and recurrent kernels
            return run(*args[:index], 0.0, *args[index + 1 :], **kwargs)
        return _overwrite(name, run(*args, **kwargs), _bounds(positions, args))


def _bounds(positions: Mapping[str, int], args: tuple[Any, ...]) -> tuple[float, float]:
    """From where to where a draw goes, as far as its arguments say."""
    found = []
    for names, otherwise in ((("low", "from"), 0), (("high", "to"), 1)):
        index = next((positions[name] for name in names if name in positions), len(args))
        found.append(args[index] if index < len(args) and args[index] is not None else otherwise)
    return found[0], found[1]


def _overwrite(name: str, drawn: Any, bounds: tuple[float, float]) -> Any:
    """``drawn`` with a constant in each place; what is not in the lists above stays random, and will be noticed."""
    if not isinstance(drawn, Tensor):
        return drawn
    middle = (bounds[0] + bounds[1]) / 2
    if name in _MASKS:
        return drawn.fill_(1)
    if name in _HALF:
        return drawn.fill_(0.5)
    if name in _MIDDLE:
        return drawn.fill_(middle if drawn.is_floating_point() else int(middle))
    return drawn
