"""``python -m accumulate check``: what it prints, its exit status, and what it says of a wrong call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accumulate.__main__ import main

SCRIPT = """\
import torch
from torch import nn

import neighbour


def fine():
    print("preparing")
    torch.manual_seed(0)
    return nn.Linear(6, 5), neighbour.loss_fn, (torch.randn(24, 6), torch.randn(24, 5))


def divided():
    model, loss_fn, batch = fine()
    return model, lambda model, x, y: loss_fn(model, x, y) / 8, batch


def pair():
    return fine()[:2]


def refused():
    return *fine()[:2], (torch.randn(3, 6), torch.randn(3, 5))


def broken():
    raise LookupError("no data here")


def broken_loss():
    model, _, batch = fine()
    return model, lambda model, x, y: model(x, y), batch


def leaves():
    raise SystemExit(0)


number = 3
"""
NEIGHBOUR = """\
from torch.nn.functional import mse_loss


def loss_fn(model, x, y):
    return mse_loss(model(x), y)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "sample.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "sample.py"
    for name in ("sample", "checked_sample", "neighbour"):
        sys.modules.pop(name, None)


def test_equal_gradients_are_status_0(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{script}:fine"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "preparing"
    assert printed[1].startswith("ok: 4 micro-batches and one batch of 24 rows give the same gradient")


def test_different_gradients_are_status_1_with_the_cause(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{script}:divided", "--steps", "8"]) == 1
    printed = capsys.readouterr().out
    assert "cause: divided twice" in printed
    assert "accumulated / big batch: 0.125" in printed
    assert main(["check", f"{script}:divided"]) == 0  # a factor that is not steps


def test_json_stands_alone_on_stdout(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{script}:divided", "--steps", "8", "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["ok"], document["cause"], document["steps"], document["rows"]) == (False, "divided twice", 8, 24)
    assert document["ratio"] == pytest.approx(1 / 8)
    assert sorted(document["errors"]) == ["bias", "weight"]
    assert document["findings"][0]["remedy"].startswith("Return the loss undivided")
    assert "preparing" in captured.err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("sample.py", "expected FILE.py:FUNCTION, got 'sample.py'"),
        (":fine", "expected FILE.py:FUNCTION, got ':fine'"),
        ("{script}:", "expected FILE.py:FUNCTION"),
        ("missing.py:fine", "there is no file 'missing.py'"),
        ("{script}:missing", "has no function 'missing'"),
        ("{script}:number", "has no function 'number'"),
        ("{script}:pair", "must return (model, loss_fn, batch), got tuple"),
        ("{script}:refused", "batch holds 3 samples, too few for 4 micro-batches"),
        ("{script}:broken", "raised an exception"),
        ("{script}:leaves", "raised an exception"),
        ("{script}:broken_loss", "the check raised an exception"),
    ],
)
def test_a_wrong_call_is_status_2_and_says_what_is_wrong(
    target: str, said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", target.format(script=script)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_users_own_exception_is_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", f"{script}:broken"])
    assert "LookupError: no data here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", f"{script}:refused"])
    assert "Traceback" not in capsys.readouterr().err  # the message says enough
    script.write_text("import nothing_of_this_name")
    with pytest.raises(SystemExit) as stopped:
        main(["check", f"{script}:fine"])
    assert stopped.value.code == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_a_file_may_be_called_like_a_module_that_is_loaded(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = sys.modules["random"]
    monkeypatch.delitem(sys.modules, "checked_random", raising=False)
    (script.parent / "random.py").write_text(SCRIPT)
    assert main(["check", f"{script.parent / 'random.py'}:fine"]) == 0
    assert sys.modules["random"] is loaded


def test_a_file_that_is_no_python_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(SystemExit) as stopped:
        main(["check", f"{tmp_path / 'data.txt'}:x"])
    assert stopped.value.code == 2
    assert "is not a Python file" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["0", "1", "some"])
def test_steps_that_are_none_are_status_2(steps: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", f"{script}:fine", "--steps", steps])
    assert stopped.value.code == 2
    assert "steps" in capsys.readouterr().err


def test_help_says_what_the_function_returns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for words in ("(model, loss_fn, batch)", "exit status", "train.py:sample --steps 8"):
        assert words in printed


def test_the_real_command_ends_with_the_status(script: Path) -> None:
    command = [sys.executable, "-m", "accumulate", "check", "sample.py:divided", "--steps", "8"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=script.parent)
    assert ended.returncode == 1, ended.stderr
    assert "divided twice" in ended.stdout
