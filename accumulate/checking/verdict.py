"""The order of the questions: do the gradients agree; if not, which experiments say why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from . import causes
from .losses import of_the_loss
from .measure import Rounding, errors, ratio, size
from .prepare import better_precisions, check_arguments, in_precision, is_low, native_subject, plainly, unharmed
from .randomness import RandomState
from .report import Finding, Report
from .subject import Grads, LossFunction, Run, Subject

__all__ = ["judge"]


def judge(model: nn.Module, loss_fn: LossFunction, batch: Sequence[Tensor], steps: int) -> Report:
    """What :func:`accumulate.check` promises."""
    check_arguments(model, loss_fn, batch, steps)
    random = RandomState(tensor.device for tensor in (*model.parameters(), *batch))
    with unharmed(model), random.kept(), plainly():
        native = native_subject(model, loss_fn, batch, steps, random)
        case, notes = _first_case(model, native)
        findings: list[Finding] = []
        if broken := _not_finite(case):
            findings.append(broken)
        elif not case.agrees:
            case, findings, more = _differing(case)
            notes += more
        return _report(case, native, findings, notes)


@dataclass
class _Case:
    """One way of running it: what the big batch gave, and what the window gave."""

    subject: Subject
    whole: Run
    window: Grads
    losses: list[float]
    """Those of the micro-batches that count."""

    def __post_init__(self) -> None:
        self.rounding = Rounding(self.subject, self.whole.grads)

    @classmethod
    def of(cls, subject: Subject) -> _Case:
        """Run both."""
        return cls(subject, subject.run(), *subject.window())

    @property
    def agrees(self) -> bool:
        """Whether the window's gradient is the big batch's."""
        return self.rounding.same(self.window, self.whole.grads)


def _first_case(model: nn.Module, native: Subject) -> tuple[_Case, list[str]]:
    """In the highest precision in which the model runs."""
    notes: list[str] = []
    better = (_tried(native, dtype, notes) for dtype in better_precisions(native))
    case = next(filter(None, better), None) or _Case.of(native)  # what raises here is not a matter of precision
    _check_comparable(model, case)
    return case, notes


def _tried(native: Subject, dtype: torch.dtype, notes: list[str]) -> _Case | None:
    try:
        return _Case.of(in_precision(native, dtype))
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        notes.append(f"{dtype} does not run ({_first_line(error)}), so small errors may be taken for rounding")
        return None


def _first_line(error: Exception) -> str:
    return f"{str(error).partition(chr(10))[0]:.120}"


def _check_comparable(model: nn.Module, case: _Case) -> None:
    """Raise if the big batch's gradient is none to compare with."""
    if not case.whole.grads or any(p.grad is not None for p in model.parameters()):
        raise ValueError(
            "the loss does not come from the model that loss_fn was given, which is a copy: loss_fn(model, *batch) "
            "must call its first argument, and no other reference to your model"
        )
    if not math.isfinite(case.whole.loss) or not math.isfinite(size(case.whole.grads)):
        raise ValueError(
            f"the whole batch has the loss {case.whole.loss!r} and no finite gradient; nothing to compare with"
        )
    if not size(case.whole.grads):
        raise ValueError("the whole batch's gradient is zero for every parameter; nothing to compare with")


def _not_finite(case: _Case) -> Finding | None:
    if all(map(math.isfinite, case.losses)) and math.isfinite(size(case.window)):
        return None
    return Finding(
        "non-finite micro-batch",
        "A micro-batch gives NaN or inf where the big batch does not: most likely one in which nothing counts (0 / 0).",
        "Return (loss, weight) with its number of items, 0 there; a mean by hand needs .sum() / count.clamp(min=1).",
    )


def _differing(case: _Case) -> tuple[_Case, list[Finding], list[str]]:
    """What is wrong, judged without random numbers if there are any."""
    if finding := causes.not_repeatable(case.subject, case.rounding, case.whole):
        return case, [finding], []
    if not causes.is_random(case.subject, case.rounding, case.whole):
        return case, _explained(case), []
    fixed = _Case.of(replace(case.subject, constants=True))
    if causes.is_random(fixed.subject, fixed.rounding, fixed.whole):
        why = "Another seed gives another gradient, from random numbers that could not be replaced by constants."
        return fixed, [Finding("randomness", why, "Draw them outside loss_fn and pass them as part of the batch.")], []
    note = (
        "dropout or other random numbers: equal batches differ with the seed, so they were replaced by constants "
        "(dropout keeps everything) and the rest was judged"
    )
    return fixed, [] if fixed.agrees else _explained(fixed), [note]


def _explained(case: _Case) -> list[Finding]:
    """One cause after another: what is found is taken away, until the gradients agree."""
    findings = []
    layer = causes.mixing_layer(case.subject, case.rounding)
    if layer and isinstance(layer.module, _BatchNorm):
        findings.append(causes.layer_finding(layer))
        case = _Case.of(replace(case.subject, frozen=True))
        if case.agrees:
            return findings
        layer = causes.mixing_layer(case.subject, case.rounding)
    if layer:
        return [*findings, causes.layer_finding(layer)]
    state = causes.carried_state(case.subject, case.rounding, case.window)
    return [*findings, state or of_the_loss(case.subject, case.rounding, case.whole)]


def _report(case: _Case, native: Subject, findings: list[Finding], notes: list[str]) -> Report:
    expected, window, dtype = case.whole.grads, case.window, case.subject.dtype
    if found := causes.by_hand(case.subject, case.rounding, case.whole):
        finding, expected = found
        findings = [finding, *findings]
    if not findings and is_low(native.dtype) and dtype != native.dtype:
        try:
            lost = causes.low_precision(replace(native, constants=case.subject.constants), case.whole)
        except RuntimeError as error:
            notes.append(f"not judged in {native.dtype}, which does not run here ({_first_line(error)})")
        else:
            if lost:
                findings, window, dtype = [lost[0]], lost[1], native.dtype
    return Report(
        ok=not findings,
        cause=", ".join(dict.fromkeys(finding.cause for finding in findings)) or None,
        ratio=ratio(window, expected),
        errors=errors(window, expected),
        steps=case.subject.steps,
        rows=case.subject.rows,
        precision=str(dtype).removeprefix("torch."),
        findings=tuple(findings),
        notes=tuple(notes),
    )
