"""The public surface: what is documented is there, nothing else is, and importing it costs nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import accumulate
from support.loops import plain_net

DOCUMENTED = {
    "AccumulateError",
    "Accumulator",
    "SyncControl",
    "UnsupportedWrapperError",
    "WindowError",
    "__version__",
    "check",
    "no_sync",
    "register",
}
MEMBERS = {
    "backward",
    "batches",
    "clip_grad_norm_",
    "close",
    "flush",
    "global_loss",
    "grad_norm",
    "is_boundary",
    "is_last",
    "is_padding",
    "load_state_dict",
    "loss",
    "micro_steps",
    "optimizer_step",
    "policy",
    "position",
    "reset",
    "scale",
    "state_dict",
    "step",
    "steps",
    "updates",
}


def test_the_public_names_are_the_documented_ones() -> None:
    assert set(accumulate.__all__) == DOCUMENTED
    assert len(accumulate.__all__) == len(DOCUMENTED) <= 10
    assert all(hasattr(accumulate, name) for name in DOCUMENTED)


def test_nothing_else_is_public() -> None:
    from types import ModuleType

    names = {name for name, value in vars(accumulate).items() if not isinstance(value, ModuleType)}
    public = {name for name in names if not name.startswith("_")}
    assert public == DOCUMENTED - {"__version__"}
    acc = accumulate.Accumulator(plain_net())
    assert {name for name in dir(acc) if not name.startswith("_")} == MEMBERS


def test_the_public_names_belong_to_the_package_and_say_what_they_promise() -> None:
    for name in DOCUMENTED - {"__version__"}:
        thing: Any = getattr(accumulate, name)
        assert thing.__module__.partition(".")[0] == "accumulate"
        first = (inspect.getdoc(thing) or "").splitlines()[0]
        assert len(first) > 20, name
    for name in MEMBERS:
        assert inspect.getdoc(getattr(accumulate.Accumulator, name)), name


def test_everything_after_the_second_argument_is_keyword_only() -> None:
    parameters = list(inspect.signature(accumulate.Accumulator).parameters.values())
    assert [p.name for p in parameters[:2]] == ["model", "steps"]
    assert [p.name for p in parameters[2:]] == ["policy", "scaler", "group", "verify"]
    assert {p.kind for p in parameters[2:]} == {inspect.Parameter.KEYWORD_ONLY}


def in_a_fresh_process(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_importing_it_after_torch_imports_no_wrapper() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import accumulate;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = in_a_fresh_process(code)
    assert "accumulate._accumulator" in new
    assert [name for name in new if name.startswith(("torch.distributed.fsdp", "torch._dynamo"))] == []
    assert [name for name in new if name.startswith(("accumulate.wrappers.", "accumulate.checking"))] == []
    assert [name for name in new if not name.startswith(("accumulate", "torch", "typing_extensions"))] == []


def test_a_plain_model_imports_no_fsdp_either() -> None:
    code = (
        "import json, sys, torch; from accumulate import Accumulator; model = torch.nn.Linear(2, 2);"
        "acc = Accumulator(model, 1); block = acc.step(); block.__enter__(); acc.backward(model(torch.ones(2)).sum());"
        "block.__exit__(None, None, None); assert model.weight.grad.any(); print(json.dumps(sorted(sys.modules)))"
    )
    loaded = in_a_fresh_process(code)
    assert "accumulate" in loaded
    assert [name for name in loaded if name.startswith(("torch.distributed.fsdp", "accumulate.wrappers.fsdp"))] == []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(4, "steps=4"), (lambda update: 2, "wrappers=[none]")],
)
def test_repr_says_what_was_found(steps: Any, expected: str) -> None:
    text = repr(accumulate.Accumulator(plain_net(), steps))
    assert expected in text
    assert "ranks=1" in text
    assert "balanced" in text
