"""What kind of loss it is: which sum of the micro-batches' gradients would be the big batch's.

For a mean without a weight it is their mean, and for a loss that couples the rows of a batch it is none.
"""

from __future__ import annotations

import math

import torch

from .measure import Rounding, combined, equations, mean_weights, ratio, scaled, scales
from .probes import Factors, Terms
from .report import COUPLES, SCALE, Finding
from .subject import Run, Subject

__all__ = ["of_the_loss"]


def of_the_loss(subject: Subject, rounding: Rounding, whole: Run) -> Finding:
    """What is wrong if no layer mixes rows, no state is carried and the gradients differ all the same."""
    runs = subject.each()
    if finding := _known_sum(subject, rounding, whole, runs):
        return finding
    entries = equations(whole.grads)
    if entries <= subject.steps + 1:  # with as many unknowns as equations everything fits
        why = f"The big batch's gradient has {entries} entries that are not zero, too few to tell the causes apart."
        return Finding("unknown", why, "Check with fewer steps or a larger model of the same kind.")
    return _fitted_sum(subject, rounding, whole, runs) or Finding(
        COUPLES,
        "No sum of the micro-batches' gradients is the big batch's, and no layer was seen to mix rows: what the loss "
        "makes of a row depends on the other rows (a contrastive loss, a statistic of the batch).",
        "Accumulation cannot repair that: keep micro-batches large, or compute the loss over the window's outputs.",
    )


def _known_sum(subject: Subject, rounding: Rounding, whole: Run, runs: list[Run]) -> Finding | None:
    """The plain sum: the loss is a sum. The mean weighted by rows: a mean over rows, whose weight is missing."""
    counting = [run for run in runs if run.weight != 0]
    plain_sum = scaled(combined([run._replace(weight=None) for run in counting]), len(counting))
    if rounding.same(plain_sum, whole.grads):
        return _sum_type(subject)
    rows = [len(part[0]) for part in subject.parts()]
    by_rows = combined([run._replace(weight=count) for run, count in zip(runs, rows, strict=True)])
    if rounding.same(by_rows, whole.grads):
        return _mean_of_means(runs, [count / subject.rows for count in rows])
    return None


def _fitted_sum(subject: Subject, rounding: Rounding, whole: Run, runs: list[Run]) -> Finding | None:
    """A mean with other weights: a mean over numbers that differ. A sum with other factors: a scale by the data.

    A sum of the terms with factors of their own: means over different numbers. One without divisions by statistics of
    the batch: a scale that depends on the parameters as well.
    """
    limit = max(1e-6, rounding.limit / 10)
    if weights := mean_weights(runs, whole.grads, limit):
        return _mean_of_means(runs, weights)
    if factors := scales(runs, whole.grads, limit):
        return _scale(subject, rounding, whole, [factor * len(runs) for factor in factors])
    if _terms_fit(subject, whole, runs, limit):
        return Finding(
            "mean of means",
            "The terms of the loss are means over numbers that differ from term to term: no single weight is right.",
            "Make them means over the same number, or run them apart, each with the weight that it has.",
        )
    bare = [subject.run(part, mode=Factors(leave_out_statistics=True)) for part in subject.parts()]
    if scales(bare, subject.run(mode=Factors(leave_out_statistics=True)).grads, limit):
        return _scale(subject, rounding, whole, [])
    return None


def _terms_fit(subject: Subject, whole: Run, runs: list[Run], limit: float) -> bool:
    """Whether a factor for each term in each micro-batch makes the big batch's gradient; runs without a term tell."""
    noted = Terms()
    subject.forward(subject.batch, noted)
    unknowns = (noted.count + 1) * subject.steps
    if not 0 < noted.count < 10 or equations(whole.grads) <= unknowns + 1:
        return False
    without = [subject.run(part, mode=Terms(index)) for index in range(noted.count) for part in subject.parts()]
    return scales([*runs, *without], whole.grads, limit) is not None


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
    theirs, right = _per_cent([weight / sum(given) for weight in given]), _per_cent(weights)
    return Finding(
        "mean of means",
        f"The loss is a mean over a number of items that differs: the micro-batches count for {theirs} % and would be "
        f"right with {right} %.",
        "Return (loss, weight), where weight is the number of items (rows, tokens, live positions) in the mean.",
    )


def _per_cent(shares: list[float]) -> str:
    return ", ".join(f"{round(100 * share, 2) + 0:g}" for share in shares)  # + 0, for -0 is written so


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
