"""The benchmark's parts that need no ranks: arguments, data, counting, the schedule, the report."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accumulate.__main__ import main
from accumulate.bench import data, plot, report
from accumulate.bench.counting import CollectiveCounter, Traffic
from accumulate.bench.loops import every
from accumulate.bench.measure import Cell, Result
from accumulate.bench.model import GPT
from accumulate.bench.plan import ACCUMULATE, EVERY, HAND, ONE, REDUCING, SILENT, Options, windows
from accumulate.bench.worker import Facts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "expected a whole number of at least 1, got '0'"),
        (["--rounds", "1.5"], "expected a whole number of at least 1, got '1.5'"),
        (["--ranks", "-2"], "expected a whole number of at least 1, got '-2'"),
        (["--seconds", "soon"], "expected a number of seconds above 0, got 'soon'"),
        (["--timeout", "inf"], "expected a number of seconds above 0, got 'inf'"),
        (["--width", "30"], "--width 30 is not a multiple of --heads 8"),
        (["--wrapper", "fsdp"], "invalid choice: 'fsdp'"),
        (["--plot", "picture.svg"], "--plot writes a PNG"),
        (["--json", "no/such/folder/out.json"], "the folder 'no/such/folder' does not exist"),
        (["--data", "source", "--tokens", "99999999"], "--tokens 99999999 is more than the"),
        (["--device", "cuda", "--ranks", "4096"], "needs one GPU each and NCCL, found"),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "missing", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_help_teaches_what_is_compared_and_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for word in ("no_sync", "fsdp2", "--plot efficiency.png", "exit status", "interleaved"):
        assert word in text


def test_without_a_command_the_help_is_printed_and_the_status_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "bench" in capsys.readouterr().out


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for arguments in (["--plot", "x.png"], ["--data", "digits"]):
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *arguments])
        assert stopped.value.code == 2
        assert "pip install 'torch-accumulate[bench]'" in capsys.readouterr().err


def test_the_default_model_is_the_one_of_the_report() -> None:
    o = Options()
    model = GPT(vocabulary=2, tokens=o.tokens, layers=o.layers, width=o.width, heads=o.heads)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 18.9


def test_the_model_predicts_a_token_from_earlier_ones_only() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=5, tokens=6, layers=2, width=16, heads=2)
    rows: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, given, out: rows.append(out.detach()))
    tokens = torch.tensor([[1, 2, 3, 4, 0, 1]])
    changed = tokens.clone()
    changed[0, 3] = 2
    model(tokens), model(changed)
    torch.testing.assert_close(rows[0][:, :4], rows[1][:, :4])  # position 3 predicts token 3: it cannot see it
    assert (rows[0][:, 4:] - rows[1][:, 4:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["digits", "source"])
def test_the_data_is_real_whole_and_within_its_vocabulary(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    loaded = data.load(name, 64)
    assert loaded.sequences.dtype == torch.int64
    assert loaded.sequences.shape[1] == 64
    assert len(loaded.sequences) > 1000
    assert 0 <= int(loaded.sequences.min()) < int(loaded.sequences.max()) < loaded.vocabulary
    assert torch.equal(loaded.sequences, data.load(name, 64).sequences)


def test_a_plain_loop_gives_the_mean_of_the_window() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=2, tokens=8, layers=1, width=8, heads=2).double()
    tokens = torch.randint(2, (4, 1, 8))
    with every(model, 4) as window:
        window(list(tokens))
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(tokens.flatten(0, 1)).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(expected) == len(list(model.parameters()))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # torch 2.13 renames two collectives
def test_the_counter_sees_payloads_and_tells_reductions_from_gathers(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with CollectiveCounter() as counter:
            dist.all_reduce(torch.zeros(10))
            dist.reduce_scatter_tensor(torch.zeros(6), torch.zeros(6))
            dist.all_gather_into_tensor(torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64))
            dist.broadcast(torch.zeros(100), 0)
    finally:
        dist.destroy_process_group()
    assert counter.traffic == Traffic(reduced=4 * 16, gathered=8 * 5, reductions=2)


def test_a_round_measures_the_modes_side_by_side_and_the_ceiling_once() -> None:
    cells = Options(steps=(1, 8)).cells()
    assert cells[:4] == [(ONE, 1), (EVERY, 1), (HAND, 1), (ACCUMULATE, 1)]
    assert cells[4:] == [(ONE, 8), (EVERY, 8), (HAND, 8), (ACCUMULATE, 8), (SILENT, 8)]


def test_a_sample_holds_at_least_four_micro_batches() -> None:
    assert [windows(steps) for steps in (1, 2, 3, 4, 32)] == [4, 2, 2, 1, 1]


def result(*, rate: float = 5.0, rounds: int = 2, ranks: int = 1, ceiling: float = 9.0) -> Result:
    options = Options(ranks=ranks, steps=(1, 4))
    cells = [Cell(mode, steps) for mode, steps in options.cells()]
    for cell in cells:
        cell.rates = [10.0, 10.0][:rounds] if cell.mode == ONE else [5.0, rate][:rounds]
        if cell.mode == SILENT:
            cell.rates = [ceiling, ceiling][:rounds]
        cell.efficiencies = [one / 10.0 for one in cell.rates]
        if cell.mode in REDUCING:
            cell.traffic = Traffic(reduced=4_000_000 * (cell.steps if cell.mode == EVERY else 1), reductions=1)
    return Result(options, Facts(1_000_000, "numbers", "CPU", 2.0), cells, seconds=3.0, final_loss=1.0)


def test_the_table_shows_rate_efficiency_and_counted_bytes() -> None:
    rows = [line.split() for line in report.table(result()).splitlines()]
    assert ["4", "1", "process", "10.00", "0%", "-"] in rows
    assert ["1", "process,", "reduce", "every", "micro-batch", "5.00", "50%", "0%", "16.0", "MB"] in rows
    assert ["1", "process,", "accumulate", "5.00", "50%", "0%", "4.0", "MB"] in rows
    assert "\x1b" not in report.table(result())


def test_a_gathered_column_appears_only_if_something_was_gathered() -> None:
    assert "gathered  " not in report.table(result()).replace("\n", "  ").split("----")[0]
    found = result()
    found.cells[1].traffic = replace(found.cells[1].traffic, gathered=7_000_000)
    assert "7.0 MB" in report.table(found)


@pytest.mark.parametrize(("rate", "rounds", "said"), [(9.0, 2, "too noisy to trust"), (5.0, 1, "one round only")])
def test_a_result_that_cannot_be_trusted_is_marked(rate: float, rounds: int, said: str) -> None:
    assert any(said in line for line in report.warnings(result(rate=rate, rounds=rounds)))


def test_a_ceiling_that_other_programs_lower_is_marked() -> None:
    assert any("reach only 40%" in line for line in report.warnings(result(ceiling=4.0)))


def test_a_quiet_result_has_no_warning_and_too_many_ranks_have_one() -> None:
    assert report.warnings(result()) == []
    assert any("share" in line for line in report.warnings(result(ranks=100_000)))


def test_the_document_is_json_with_one_entry_per_row() -> None:
    document = json.loads(json.dumps(report.document(result())))
    assert document["model"]["gradient_bytes"] == 4_000_000
    assert [entry["mode"] for entry in document["results"][:4]] == [
        "one_process",
        "reduce_every",
        "no_sync",
        "accumulate",
    ]
    assert [entry["processes"] for entry in document["results"]] == [1] * 9
