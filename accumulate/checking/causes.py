"""The experiments that tell one cause from another: each runs the model again with one thing changed.

Nothing here looks at names: a cause is reported because an experiment came out as only that cause makes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .measure import Rounding, combined, distance, ratio, scaled
from .probes import Factors, Layer, RowsOfLayers, first_that_mixes_rows
from .report import COUPLES, SCALE, Finding
from .subject import Grads, Run, Subject

__all__ = [
    "by_hand",
    "carried_state",
    "is_random",
    "layer_finding",
    "low_precision",
    "mixing_layer",
    "not_repeatable",
]


def not_repeatable(subject: Subject, rounding: Rounding, whole: Run) -> Finding | None:
    """The same batch, seed and model once more: a difference is state outside the model, a mere factor a normaliser."""
    again = subject.run().grads
    if rounding.same(again, whole.grads):
        return None
    remedy = "Keep such state in buffers of the model, or fix it for the check; then check again."
    if rounding.parallel(again, whole.grads):
        why = (
            f"The same batch, seed and weights gave {ratio(again, whole.grads):.4g} times the gradient when run again."
        )
        return Finding(SCALE, f"{why} Something that loss_fn keeps between calls scales the loss.", remedy)
    why = "The same batch, seed and weights gave another gradient when run again, so nothing can be compared."
    return Finding("not repeatable", why, remedy)


def is_random(subject: Subject, rounding: Rounding, whole: Run) -> bool:
    """The same batch with another seed: a difference comes from random numbers."""
    return not rounding.same(subject.run(seed=1).grads, whole.grads)


def by_hand(subject: Subject, rounding: Rounding, whole: Run) -> tuple[Finding, Grads] | None:
    """A micro-batch's loss is multiplied by 1/steps or steps, and leaving that out changes the big batch by this.

    Then the user scales by hand. A count of rows would not be the same in both, and the coefficient of one term among
    several is not a factor of the whole. Also returns the big batch's gradient without the factor.
    """
    noted = Factors()
    subject.forward(subject.parts()[0], noted)
    for factor in (1.0 / subject.steps, float(subject.steps)):
        if not any(math.isclose(factor, seen, rel_tol=1e-6) for seen in noted.seen):
            continue
        without = subject.run(mode=Factors(factor)).grads
        if rounding.same(scaled(without, factor), whole.grads):
            return _scaled_by_hand(subject.steps, factor), without
    return None


def _scaled_by_hand(steps: int, factor: float) -> Finding:
    meant = f"If the factor belongs to the loss and {steps} is a coincidence, check with another number of steps."
    if factor < 1:
        return Finding(
            "divided twice",
            f"loss_fn divides its loss by {steps}, in the big batch too, and Accumulator divides by steps as well.",
            f"Return the loss undivided. {meant}",
        )
    return Finding(
        "not divided",
        f"loss_fn multiplies its loss by {steps}, which takes back what Accumulator divides by.",
        f"Return the loss itself. {meant}",
    )


def mixing_layer(subject: Subject, rounding: Rounding) -> Layer | None:
    """Each row's output of each layer, in the big batch and in its micro-batch: the first layer where they differ."""

    def watched(batch: tuple[Tensor, ...]) -> list[Layer]:
        model = subject.fresh()
        rows = RowsOfLayers(model, len(batch[0]))
        subject.run(batch, on=model)
        return rows.seen

    return first_that_mixes_rows(watched(subject.batch), [watched(p) for p in subject.parts()], rounding.limit)


def layer_finding(layer: Layer) -> Finding:
    """What to say of a layer that mixes rows."""
    where = f"{layer.name} ({type(layer.module).__name__})"
    if isinstance(layer.module, _BatchNorm):
        return Finding(
            "BatchNorm",
            f"{where} normalises with the statistics of the batch at hand; a micro-batch has others than the whole.",
            "Use GroupNorm or LayerNorm, or put BatchNorm in eval mode with statistics that are trained already.",
        )
    return Finding(
        COUPLES,
        f"What {where} makes of a row depends on the other rows of its batch.",
        "Accumulation cannot repair that: make the layer treat each row by itself, or keep micro-batches large.",
    )


def carried_state(subject: Subject, rounding: Rounding, window: Grads) -> Finding | None:
    """Micro-batches each on a fresh copy, against one after another on one: a difference is state that forward changes.

    If they differ by factors only, the state is a running normaliser.
    """
    fresh = subject.each()
    if rounding.same(window, combined(fresh)):
        return None
    model = subject.fresh()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    chained = [subject.run(part, on=model).grads for part in subject.parts()]
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    only_scaled = all(rounding.parallel(one, other.grads) for one, other in zip(chained, fresh, strict=True))
    return Finding(
        SCALE if only_scaled else "state between micro-batches",
        f"forward changes {', '.join(changed[:3]) or 'state that is in no buffer'}, and the next micro-batch uses it.",
        "Update such state once per window, or fix it during training.",
    )


def low_precision(native: Subject, whole: Run) -> tuple[Finding, Grads] | None:
    """Both ways in the parameters' own dtype, against float64: accumulation may not lose much more than one big batch.

    Also returns the accumulated gradient in that dtype.
    """
    window, _ = native.window()
    lost_once, lost = distance(native.run().grads, whole.grads), distance(window, whole.grads)
    if lost <= 2 * lost_once + 1e-3:
        return None
    finding = Finding(
        "low precision",
        f"In float64 it is exact, but in {native.dtype} accumulation is {lost:.1e} off, one big batch {lost_once:.1e}.",
        "Keep parameters in float32 (with autocast for forward), or use fewer micro-batches.",
    )
    return finding, window
