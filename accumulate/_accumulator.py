"""The public class: what users call, in the order in which a loop calls it. It knows no wrapper by name."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from typing_extensions import Self, Unpack

from . import _arguments as arguments
from ._advice import batch_statistics, local_gradients
from ._amp import FIRST_WEIGHT, Amp
from ._batches import Batches
from ._contexts import Block
from ._gradients import AllGradients, Gradients, total_norm
from ._ranks import Ranks
from ._reports import Reports
from ._state import State
from ._sync import Found, find, release
from ._typing import BackwardOptions, Optimizer, Steppable
from ._update import Updates
from ._verify import Verifier
from ._version import __version__
from ._windows import Windows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Accumulator"]

T = TypeVar("T")


class Accumulator(Reports):
    """N micro-batches give one exact gradient and one reduction, in any loop and under any wrapper.

    ``model`` is a module or several; ``steps`` the micro-batches of one window: an int >= 1, or a callable of the
    update index, read once when a window opens. ``policy`` says what FSDP keeps between micro-batches: "memory"
    nothing, "balanced" gradients and what backward has gathered, "speed" all parameters. With ``scaler``, a
    ``torch.amp.GradScaler``, losses are multiplied by its factor, and ``.grad`` holds it until unscaled. ``group``
    overrules the ranks over which weights are summed (default: those that the wrapper averages over). ``verify=True``
    compares windows and gradients over the ranks at each boundary, and raises on all of them; a number is how many
    seconds one waits for the others (True: 300). Construct it on every rank, with the wrapped and loaded model.

    Raises ``TypeError`` or ``ValueError`` for a wrong argument, :class:`UnsupportedWrapperError` for a
    wrapper that cannot be steered, :class:`AccumulateError` if ranks disagree.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        steps: int | Callable[[int], int] = 1,
        *,
        policy: str = "balanced",
        scaler: GradScaler | None = None,
        group: ProcessGroup | None = None,
        verify: bool | float = False,
    ) -> None:
        models = arguments.as_models(model)
        steps = arguments.check_setting(steps)
        policy = arguments.check_policy(policy)
        scaler = arguments.check_scaler(scaler)
        self._found = find(models)
        try:
            gradients = AllGradients(Gradients(name, each, self._found) for name, each in models.items())
            ranks = Ranks(self._found, group, gradients[0].device)
            shown = "a callable" if callable(steps) else steps
            versions = f"accumulate {__version__}, torch {torch.__version__}"
            scales = None if scaler is None else f"{type(scaler).__name__} at {scaler.get_scale()}"
            wrappers = self._wrappers()
            ranks.agree(steps=shown, policy=policy, wrappers=wrappers, versions=versions, scaler=scales)
            seconds = arguments.check_verify(verify)
            verifier = Verifier(ranks, self._found, seconds) if seconds else None
            guess = None if scaler is None else FIRST_WEIGHT
            self._windows = Windows(steps, self._found, gradients, ranks, models, policy, verifier, guess)
        except BaseException:
            release(self._found)
            raise
        self._amp = None if scaler is None else Amp(scaler, self._windows, gradients, ranks)
        self._detach = weakref.finalize(self, _detach, self._windows, self._found, self._amp)  # or by close()
        self._detach.atexit = False
        self._gradients = gradients
        self._models = list(models.values())
        self._grad_norm: Tensor | None = None
        self._term = self._windows.term if self._amp is None else self._amp.term
        self._updates = Updates(self._amp)
        facts = {"scaler": None if scaler is None else type(scaler).__name__, "wrappers": wrappers}
        self._state = State(self._windows, gradients, self._found, self._updates, self._amp, facts)
        advice = [] if steps == 1 else [*batch_statistics(models.values())]
        if group is None:
            advice += local_gradients(models.values(), self._found)
        for text in advice:
            warnings.warn(text, stacklevel=2)

    def step(self, boundary: bool | None = None) -> Block:
        """The context of one micro-batch: forward and backward, or only backward, go inside.

        The micro-batch that fills the window reduces; ``boundary=True`` or ``False`` overrules the count
        (then all ranks must do so alike). A block left by an exception is not counted; if backward had
        started, the window is broken until ``reset()``. Raises :class:`WindowError` on entry if a block is
        open already, if the window is broken, or if gradients were cleared or changed since the last block;
        :class:`AccumulateError` on leaving a boundary if a wrapper did not reduce.
        """
        if self._amp is not None:
            self._amp.settle()
        return Block(self._windows, arguments.check_boundary(boundary))

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        **kwargs: Unpack[BackwardOptions],
    ) -> None:
        """Add this loss to the window: scale it, then run its backward. The user's tensor is not changed.

        ``loss`` is a scalar: a mean over ``weight`` items, or with ``reduction="sum"`` their sum. ``weight`` is a
        number or a 0-dim tensor on any device (never read on the host); without it, a micro-batch counts 1.
        ``weight=0`` as a number drops the micro-batch, whatever its loss is, while this rank still takes part in every
        collective; all other losses of the window, on all ranks, then need a weight too (1 will do). ``kwargs`` go to
        ``Tensor.backward``. Several calls in one block are terms of one micro-batch. Raises ``ValueError`` or
        ``TypeError`` for a loss or weight that cannot be one, :class:`WindowError` outside a block or if they mix.
        """
        arguments.check_loss(loss)
        if weight is not None or reduction != "mean":
            weight = arguments.check_weight(weight, reduction)
        scaled = self._term(loss, weight, reduction)
        if self._windows.begin_backward(retain=bool(kwargs)):
            try:
                scaled.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch has no annotations here
            except BaseException:
                self._windows.break_off()
                raise

    def scale(self, loss: Tensor, weight: float | Tensor | None = None, reduction: str = "mean") -> Tensor:
        """The loss as :meth:`backward` would run it, for code that has its own backward call; counts it once."""
        arguments.check_loss(loss)
        return self._term(loss, arguments.check_weight(weight, reduction), reduction)

    def batches(
        self,
        iterable: Iterable[T],
        *,
        weight: Callable[[T], float | Tensor] | None = None,
        last: Literal["close", "carry"] = "close",
    ) -> Iterator[T]:
        """Every batch of ``iterable``, in windows known ahead: the last one, if short, still has its boundary.

        Each batch needs one ``step()`` block. A rank that runs out before others is given its last batch again, to
        contribute nothing (:attr:`is_padding`). ``weight=fn`` counts the batches of a window ahead: a loss with that
        weight is exact at once, and losses without one stand beside it as means over micro-batches. With
        ``last="carry"`` a window may go on in the next loop. Without a ``len`` on every rank a window is pulled ahead.
        Raises :class:`WindowError` if a window was left open, :class:`AccumulateError` if only some ranks have
        data; an exception of the iterable comes when its batch is due.
        """
        arguments.check_batches(iterable, weight, last)
        return Batches(self._windows, self._models, iterable, weight, last == "carry").run()

    def flush(self) -> bool:
        """Close a short window now, reduced and exactly weighted; True if there was one (``is_boundary`` is
        then true).

        A collective: call it on every rank, for instance after the loop of an epoch. A rank whose window is
        empty takes part where its wrapper can (DDP without buffers). Reads one small vector on the host. Raises
        :class:`WindowError` inside a block.
        """
        closed = self._windows.flush()
        if closed and self._amp is not None:
            self._amp.share_factor()
        return closed

    def reset(self) -> None:
        """Drop an open window: its count, its weights and its gradients, sums that FSDP2 hides included.

        Call it on every rank. The only way on after an exception has broken a window. Raises :class:`WindowError`
        inside a block, :class:`AccumulateError` for an FSDP1 model that an exception has left unusable.
        """
        self._windows.reset()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the closed window's gradient to ``max_norm``; returns its norm before, over all shards and
        models.

        A 0-dim tensor, the same on every rank of a wrapped model. A scaler's factor is not in it, whether the gradients
        have been unscaled or not; that is left as it is. Raises :class:`WindowError` off the boundary, where
        gradients are partial (FSDP2 would report 0), ``ValueError`` for a negative or NaN ``max_norm``.
        """
        self._windows.require_boundary("clip_grad_norm_")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be at least 0, got {max_norm!r}")
        without_factor = {} if self._amp is None else {"norms_of": self._amp.norms}
        self._grad_norm = total_norm(self._gradients, float(norm_type), **without_factor)
        for gradients in self._gradients:
            gradients.clip(max_norm, self._grad_norm)
        return self._grad_norm

    def optimizer_step(
        self, *optimizers: Optimizer, max_norm: float | None = None, schedulers: Iterable[Steppable] = ()
    ) -> bool:
        """At a boundary: unscale, clip, step the optimizers, update the scaler, step the schedulers, clear the
        gradients. Off the boundary: nothing.

        Returns whether the step was taken: an optimizer takes each update once, so this can be called after every
        block. With a scaler, a gradient that is not finite on any rank skips all the optimizers of the call, and the
        schedulers; the scaler is updated once per window, when its last optimizer has been given here. Raises
        ``TypeError`` without an optimizer, :class:`WindowError` inside a block, or if the gradients were unscaled and
        ``scaler.update()`` called already.
        """
        if not optimizers:
            raise TypeError("optimizer_step() needs at least one optimizer")
        schedulers = tuple(schedulers)
        if not self._windows.at_boundary("optimizer_step"):
            return False
        pending = self._updates.pending(optimizers, self.updates)
        if pending and max_norm is not None:
            self.clip_grad_norm_(max_norm)
        return bool(pending) and self._updates.take(pending, schedulers, self.updates)

    def state_dict(self, gradients: bool = True) -> dict[str, object]:
        """Everything needed to go on elsewhere, bit for bit, as numbers, strings and copies of tensors.

        In mid-window each rank saves its own, for it holds that rank's partial gradients. At a boundary it holds
        counters and reports, and gradients only if their update has not been taken; ``gradients=False`` leaves them
        out. It has no weights, optimizer, scaler, random state or position in the data: save those beside it. Raises
        :class:`WindowError` inside a block, and in mid-window for ``gradients=False``, for a broken window, and where a
        wrapper keeps partial gradients elsewhere (FSDP): save at a boundary there.
        """
        return self._state.save(gradients, self._grad_norm)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state`` was saved; the saved gradients are then in ``.grad``.

        Call it on every rank: all load, or none does and nothing is changed. Raises ``TypeError`` or ``ValueError``
        for what ``state_dict`` did not return, :class:`WindowError` if a window is open (see :meth:`reset`) or if
        partial gradients do not fit: other steps, policy, wrappers, parameters, or another rank's;
        :class:`AccumulateError` if another rank fails or has the state of another moment.
        """
        self._grad_norm = self._state.load(state)

    def close(self) -> None:
        """Detach from the model, which is then as it was found; an open window is dropped, as by ``reset()``.

        Calling it twice is fine; any later block raises :class:`WindowError`, and so does ``close`` inside a block. The
        end of ``with Accumulator(...)`` does the same, and warns if it drops a window.
        """
        self._windows.refuse_inside("close")
        self._detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        lost = self.position
        self.close()
        if lost and kind is None:
            warnings.warn(f"a window of {lost} micro-batches was dropped; call flush() first to use them", stacklevel=2)


def _detach(windows: Windows, found: Sequence[Found], amp: Amp | None) -> None:
    """Leave the model as it was found; not a method, so that it can run when the accumulator has gone."""
    windows.close()
    release(found)
    if amp is not None:
        amp.release()
