"""The experiments that tell one cause from another. Each runs the model again with one thing changed.

Nothing here looks at names: a cause is reported because an experiment came out as only that cause makes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .measure import Rounding, combined, distance, mean_weights, ratio, scaled, scales
from .probes import Factors, Layer, RowsOfLayers, first_that_mixes_rows
from .report import Finding
from .subject import Grads, Run, Subject

__all__ = ["by_hand", "carried_state", "is_random", "low_precision", "mixing_layer", "not_repeatable", "of_the_loss"]

SCALE = "data-dependent scale"
COUPLES = "couples the batch"


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
    """A multiplication by 1/steps or steps is left out; if just that factor goes, in the big batch as in a micro-batch,

    the user scales by hand. Also returns the big batch's gradient without it. A count of rows would not be the same
    for both, and the coefficient of one term among several is not a factor of the whole.
    """
    part = subject.parts()[0]
    noted = Factors()
    subject.forward(part, noted)
    for factor in (1.0 / subject.steps, float(subject.steps)):
        if not any(math.isclose(factor, seen, rel_tol=1e-6) for seen in noted.seen):
            continue
        without = subject.run(mode=Factors(factor)).grads
        without_in_part = subject.run(part, mode=Factors(factor)).grads
        if rounding.same(scaled(without, factor), whole.grads) and rounding.same(
            scaled(without_in_part, factor), subject.run(part).grads
        ):
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


def of_the_loss(subject: Subject, rounding: Rounding, whole: Run) -> Finding:
    """Which sum of the micro-batches' gradients is the big batch's? Their plain sum: the loss is a sum.

    A mean with other weights: a mean over numbers that differ. A sum with other factors: a scale that depends on the
    data. If only without divisions by statistics: a scale that depends on the parameters too. Else rows are coupled.
    """
    entries = sum(int(grad.count_nonzero()) for grad in whole.grads.values())
    runs = subject.each()
    limit = max(1e-6, rounding.limit / 10)
    counting = [run for run in runs if run.weight != 0]
    plain_sum = combined([run._replace(weight=None) for run in counting])
    if rounding.same(scaled(plain_sum, len(counting)), whole.grads):
        return _sum_type(subject)
    by_rows = [run._replace(weight=len(part[0])) for run, part in zip(runs, subject.parts(), strict=True)]
    if rounding.same(combined(by_rows), whole.grads):
        return _mean_of_means(runs, [len(part[0]) / subject.rows for part in subject.parts()])
    if entries <= subject.steps + 1:
        return _too_few(entries)
    if weights := mean_weights(runs, whole.grads, limit):
        return _mean_of_means(runs, weights)
    if factors := scales(runs, whole.grads, limit):
        return _scale(subject, rounding, whole, [factor * len(runs) for factor in factors])
    bare = [subject.run(part, mode=Factors(leave_out_statistics=True)) for part in subject.parts()]
    bare_whole = subject.run(mode=Factors(leave_out_statistics=True)).grads
    if scales(bare, bare_whole, limit):
        return _scale(subject, rounding, whole, [])
    return Finding(
        COUPLES,
        "No sum of the micro-batches' gradients is the big batch's, and no layer was seen to mix rows: what the loss "
        "makes of a row depends on the other rows (a contrastive loss, a statistic of the batch).",
        "Accumulation cannot repair that: keep micro-batches large, or compute the loss over the window's outputs.",
    )


def _too_few(entries: int) -> Finding:
    why = f"The big batch's gradient has {entries} entries that are not zero, too few to tell the causes apart."
    return Finding("unknown", why, "Check with fewer steps or a larger model of the same kind.")


def _sum_type(subject: Subject) -> Finding:
    noted = Factors()
    subject.forward(subject.parts()[0], noted)
    counts = (1.0 / factor for factor in noted.seen if 0 < factor < 1)
    for number in counts:
        if math.isclose(number, round(number), rel_tol=1e-6) and round(number) % subject.rows == 0:
            return Finding(
                "divided twice",
                f"loss_fn divides by {round(number)}, the size of the whole window, and Accumulator by steps as well.",
                "Divide by the size of the micro-batch: return a mean, with its number of items as weight.",
            )
    return Finding(
        "sum-type loss",
        "The micro-batches' gradients add up to the big batch's: the loss is a sum, or divided by a total already.",
        'Return a mean, or (sum / n, n) here and in the loop backward(sum, weight=n, reduction="sum").',
    )


def _mean_of_means(runs: list[Run], weights: list[float]) -> Finding:
    given = [1.0 if run.weight is None else run.weight for run in runs]
    theirs = ", ".join(f"{100 * weight / sum(given):.3g}" for weight in given)
    right = ", ".join(f"{100 * weight:.3g}" for weight in weights)
    return Finding(
        "mean of means",
        f"The loss is a mean over a number of items that differs: the micro-batches count for {theirs} % and would be "
        f"right with {right} %.",
        "Return (loss, weight), where weight is the number of items (rows, tokens, live positions) in the mean.",
    )


def _scale(subject: Subject, rounding: Rounding, whole: Run, factors: list[float]) -> Finding:
    """Also runs each row twice: what changes the gradient then is the number of rows, not what they hold."""
    twice = subject.run(tuple(torch.cat([tensor, tensor]) for tensor in subject.batch)).grads
    times = ratio(twice, whole.grads)
    remedy = "Compute it over the whole window, or use a constant; the weight of a mean goes into backward(weight=...)."
    if rounding.parallel(twice, whole.grads) and not math.isclose(times, 1.0, rel_tol=1e-3):
        why = f"The loss depends on the number of rows: each row twice makes its gradient {times:.4g} times as large."
        return Finding(SCALE, why, remedy)
    shown = f" (here {', '.join(f'{1 / factor:.3g}' for factor in factors)})" if factors and all(factors) else ""
    why = f"Each micro-batch is right but for a factor of its own{shown}"
    return Finding(SCALE, f"{why}: the loss is divided by a statistic of the batch.", remedy)


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
