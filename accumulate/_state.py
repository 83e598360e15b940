"""Saving an accumulator between two micro-batches and loading it elsewhere, bit for bit.

What forced this design:

- In mid-window each rank's gradients and losses are its own: a state belongs to the rank that saved it, and partial
  gradients fit only the model, the wrappers and the window length that they were made with.
- A rank that cannot load must not leave the others waiting in its next collective: all load, or none does.
- Whatever is wrong with a state, it is found before anything is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, distributed as dist

from ._agreement import Report, agree, exchange, expect_rest
from ._amp import Amp
from ._errors import WindowError
from ._gradients import Gradients
from ._guards import refuse_changed_gradients, refuse_hooks, still_due
from ._schema import VERSION, check_gradients, check_state, copied, describe, differences, moved
from ._sync import Found
from ._tally import Tally
from ._update import Updates
from ._windows import Windows

__all__ = ["State"]


class State:
    """Saves and loads what one accumulator knows, its partial gradients included."""

    def __init__(
        self,
        windows: Windows,
        gradients: Sequence[Gradients],
        found: Sequence[Found],
        updates: Updates,
        amp: Amp | None,
        facts: Mapping[str, object],
    ) -> None:
        self._windows = windows
        self._gradients = gradients
        self._found = found
        self._updates = updates
        self._amp = amp
        self._facts = facts
        """What has to be the same in mid-window, by the names that messages give them."""

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, gradients: bool, grad_norm: Tensor | None) -> dict[str, object]:
        """Everything as plain numbers, strings and copies of tensors."""
        windows = self._windows
        windows.refuse_inside("state_dict")
        tally, closed = windows.open, windows.closed
        if tally is not None:
            self._refuse_to_save(tally, gradients)
        due = tally is None and windows.is_boundary and gradients and self._is_due()
        whole = tally is not None or due
        return {
            "version": VERSION,
            "rank": _rank(),
            "ranks": windows.ranks.size,
            "updates": windows.updates,
            "micro_steps": windows.micro_steps,
            "is_boundary": windows.is_boundary,
            "mean_weight": copied(windows.correction.mean_weight),
            "grad_norm": copied(grad_norm),
            "closed": None if closed is None else closed.state(),
            "open": None if tally is None else tally.state(),
            "orders": {name: c.resuming.order() for name, c in self._found if c.resuming is not None},
            "fits": self._fits(windows.updates) if whole else None,
            "gradients": {each.name: _sums(each) for each in self._gradients} if whole else None,
        }

    def _refuse_to_save(self, tally: Tally, gradients: bool) -> None:
        at = f"micro-batch {tally.position} of {tally.steps}"
        if tally.broken:
            raise WindowError(f"state_dict() of a broken window: {tally.broken}. Call reset() to drop it, then save.")
        if not gradients:
            raise WindowError(
                f"state_dict(gradients=False) would lose the partial gradients of the open window, after {at}. Save "
                "when is_boundary is true, or with gradients=True."
            )
        if what := self._not_in_grad():
            raise WindowError(
                f"the partial gradients of a window cannot be saved here: {what}, and this is {at}. Save when "
                "is_boundary is true, for instance after flush()."
            )
        refuse_changed_gradients(self._gradients, tally)

    def _not_in_grad(self) -> str | None:
        """What is not whole in ``.grad`` of this rank, in words."""
        for name, control in self._found:
            if control.resuming is None:
                return f"the sums of {name} ({type(control.module).__name__}) are not whole in .grad of each rank"
        for each in self._gradients:
            for name, param in each.named.items():
                if param.grad is not None and type(param.grad) is not Tensor:
                    return f"the gradient of {each.name}.{name} is a {type(param.grad).__name__}, not a plain tensor"
        return None

    def _is_due(self) -> bool:
        """Whether the closed window's gradient still waits for its update, and can be saved."""
        if not self._waits:
            return False
        what = self._not_in_grad()
        if self._amp is not None and self._amp.has_unscaled:
            what = "it has been unscaled, which the scaler's own state does not tell"
        if what is None:
            return True
        warnings.warn(
            f"the gradient of the closed window is not saved: {what}. Save after the update, or with gradients=False.",
            stacklevel=4,
        )
        return False

    @property
    def _waits(self) -> bool:
        """Whether the closed window's gradient waits for its update."""
        # torch 2.13: a fused optimizer's step changes no version, and hooks do not see one that is not torch's.
        return not self._windows.surroundings.is_updated and any(each.is_due for each in self._gradients)

    def _fits(self, updates: int) -> dict[str, object]:
        """What a partial gradient fits."""
        parameters = {each.name: {k: describe(p) for k, p in each.named.items()} for each in self._gradients}
        steps, policy = self._windows.lengths.of(updates), self._windows.policy
        return {"steps": steps, "policy": policy, **self._facts, "parameters": parameters}

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, state: object) -> Tensor | None:
        """Take over a state on every rank, or change nothing on any; returns its gradient norm."""
        groups = self._windows.ranks.groups
        try:
            ready = self._prepare(state)
            mine = self._report(ready)
        except Exception as error:
            exchange(groups, Report(_rank(), f"{type(error).__name__}: {error}"))  # for which the others are waiting
            raise
        every = exchange(groups, mine)
        agree(every)
        self._take_over(ready, every)
        grad_norm: Tensor | None = ready["grad_norm"]
        return grad_norm

    def _prepare(self, state: object) -> dict[str, Any]:
        """The checked state, its tensors copied to where they are needed."""
        windows = self._windows
        windows.check_idle("load_state_dict")
        if windows.loops.running is not None:
            raise WindowError("load_state_dict() inside a batches() loop; load before the loop begins")
        if windows.open is not None:
            raise WindowError(
                f"load_state_dict() while a window is open after micro-batch {windows.open.position} of "
                f"{windows.open.steps}; call reset() first to drop it."
            )
        windows.surroundings.check()
        ready = check_state(state)
        if ready["open"] is not None:
            refuse_hooks(self._gradients, ready["open"]["steps"])
        if ready["fits"] is not None:
            self._refuse_misfit(ready)
            ready["gradients"] = self._prepared_gradients(ready["gradients"])
        here, summed = self._gradients[0].device, windows.ranks.device  # where losses are, and where weights are summed
        ready["mean_weight"], ready["grad_norm"] = moved(ready["mean_weight"], summed), moved(ready["grad_norm"], here)
        for name in ("open", "closed"):
            if (given := ready[name]) is not None:
                placed = {k: moved(value, here if k in ("losses", "means") else summed) for k, value in given.items()}
                ready[name] = Tally.restored(placed, ready["mean_weight"], windows.ranks.size)
        return ready

    def _refuse_misfit(self, state: dict[str, Any]) -> None:
        ours = {"rank": _rank(), "ranks": self._windows.ranks.size, **self._fits(state["updates"])}
        theirs = {"rank": state["rank"], "ranks": state["ranks"], **state["fits"]}
        if not (found := list(differences(theirs, ours))):
            return
        shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
        raise WindowError(
            f"the state has partial gradients, which fit only where they were made: {shown}. Each rank loads the state "
            "that it saved, into an Accumulator made with the same arguments; a state saved after an update fits any."
        )

    def _prepared_gradients(self, loaded: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        prepared = {}
        for each in self._gradients:
            given = loaded.get(each.name)
            if type(given) is not dict or len(loaded) != len(self._gradients):
                raise ValueError(
                    f"state['gradients'] must have one dict for each model, got {sorted(map(repr, loaded))}"
                )
            check_gradients(given, each.named, each.name)
            prepared[each.name] = {k: g.detach().to(each.named[k].device, copy=True) for k, g in given.items()}
        return prepared

    def _report(self, ready: dict[str, Any]) -> Report:
        mean, tally, orders = ready["mean_weight"], ready["open"], ready["orders"]
        own = (ready["rank"], ready["ranks"]) == (_rank(), self._windows.ranks.size)
        seen = None if tally is None else (tally.real, float(tally.totals()[0]))
        resuming = {name: c.resuming for name, c in self._found if c.resuming is not None and name in orders}
        reordered = frozenset(name for name, each in resuming.items() if each.can_restore(orders[name]))
        return Report(_rank(), None, ready["updates"], None if mean is None else float(mean), own, seen, reordered)

    def _take_over(self, ready: dict[str, Any], every: Sequence[Report]) -> None:
        windows, tally = self._windows, ready["open"]
        for name, control in self._found:
            if control.resuming is not None and all(name in report.reordered for report in every):
                control.resuming.restore(ready["orders"][name])
        windows.updates, windows.micro_steps = ready["updates"], ready["micro_steps"]
        windows.is_boundary, windows.open = ready["is_boundary"], tally
        windows.closed = ready["closed"] if all(report.is_own for report in every) else None
        windows.correction.restore(ready["mean_weight"])
        if tally is not None:
            windows.loops.resume(tally)
            expect_rest(tally, every)
        due = tally is None and ready["gradients"] is not None
        self._updates.done = 0 if tally is not None or due else ready["updates"]
        for each in self._gradients if ready["gradients"] is not None else ():
            for name, param in each.named.items():
                param.grad = ready["gradients"][each.name].get(name)
            each.remember()
            each.close()
        windows.surroundings.is_updated = not due
        windows.before_opening = self._refuse_due if due else None
        for _, control in self._found if tally is not None else ():
            assert control.resuming is not None  # else the wrappers were not those that the state was saved with
            control.resuming.loaded()

    def _refuse_due(self) -> None:
        """Raise if the gradient that was loaded at a boundary has not been used."""
        if self._waits:
            raise still_due()
        self._windows.before_opening = None


def _sums(gradients: Gradients) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in gradients.named.items() if p.grad is not None}


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
