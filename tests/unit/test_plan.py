"""``python -m accumulate plan``: formulas against numbers worked out by hand, and what the command says and refuses."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from accumulate.__main__ import main
from accumulate.bench import plot
from accumulate.plan import arguments, report, units
from accumulate.plan.cost import LONGEST, Cluster, Forecast, Job, Parts, forecast, limit, parts, smallest
from accumulate.plan.volume import EACH, POLICIES, WRAPPERS, Held, Model, Volume, held, volume

MODEL = Model(1000, root=200, layers=4, stored=4, gathered=2, reduced=4)
SMALL = Cluster(nodes=2, ranks_per_node=2, within=1e4, between=1e3)


# -- volumes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "policy", "shards", "expected"),
    [
        ("ddp", "memory", 1, Volume(0, 0, 4000)),
        ("ddp", "balanced", 1, Volume(0, 0, 4000)),
        ("ddp", "speed", 1, Volume(0, 0, 4000)),
        ("ddp", EACH, 1, Volume(0, 0, 3 * 4000)),
        ("fsdp1", "memory", 8, Volume(2 * (6 * 1000 - 3 * 200), 3 * 4000, 0)),
        ("fsdp1", "balanced", 8, Volume(2 * (6 * 1000 - 3 * 200), 4000, 0)),
        ("fsdp1", "speed", 8, Volume(2 * (6 * 1000 - 3 * 200), 4000, 0)),
        ("fsdp2", "memory", 8, Volume(2 * (6 * 1000 - 3 * 200), 3 * 4000, 0)),
        ("fsdp2", "balanced", 8, Volume(2 * (1000 + 3 * 800), 4000, 0)),
        ("fsdp2", "speed", 8, Volume(2 * 1000, 4000, 0)),
        ("fsdp2", EACH, 8, Volume(2 * (6 * 1000 - 3 * 200), 3 * 4000, 0)),
        ("hsdp", "memory", 4, Volume(2 * (6 * 1000 - 3 * 200), 3 * 4000, 1000)),
        ("hsdp", "balanced", 4, Volume(2 * (1000 + 3 * 800), 4000, 1000)),
        ("hsdp", "speed", 4, Volume(2 * 1000, 4000, 1000)),
        ("hsdp", EACH, 4, Volume(2 * (6 * 1000 - 3 * 200), 3 * 4000, 3 * 1000)),
    ],
)
def test_a_window_of_three_hands_over_what_the_policy_table_says(
    wrapper: str, policy: str, shards: int, expected: Volume
) -> None:
    assert volume(MODEL, wrapper, policy, 3, shards) == expected


@pytest.mark.parametrize(
    ("wrapper", "policy", "gathered"),
    [
        ("fsdp1", "memory", 3 * 1000),
        ("fsdp1", "balanced", 1000),
        ("fsdp2", "memory", 3 * 1000),
        ("fsdp2", "balanced", 1000),
        ("fsdp2", "speed", 1000),
    ],
)
def test_units_that_forward_does_not_reshard_are_not_gathered_again(wrapper: str, policy: str, gathered: int) -> None:
    kept = replace(MODEL, reshard=False)
    assert volume(kept, wrapper, policy, 3, 8).all_gather == 2 * gathered


@pytest.mark.parametrize(
    ("wrapper", "policy", "shards", "expected"),
    [
        ("ddp", "balanced", 1, Held(4000, 0, 8000, 8000)),
        ("fsdp1", "balanced", 8, Held(500, 0, 2000, 1000)),  # sums in the dtype of what was gathered
        ("fsdp1", "memory", 8, Held(500, 0, 500, 1000)),
        ("fsdp2", "memory", 8, Held(500, 0, 500, 1000)),
        ("fsdp2", "balanced", 8, Held(500, 2000, 4000, 1000)),
        ("fsdp2", "speed", 8, Held(500, 2000, 4000, 1000)),
        ("hsdp", "memory", 4, Held(1000, 0, 1000, 2000)),
    ],
)
def test_a_rank_holds_shards_and_what_the_policy_keeps(wrapper: str, policy: str, shards: int, expected: Held) -> None:
    found = held(MODEL, wrapper, policy, shards)
    assert found == expected
    assert found.total == sum(expected)


@given(
    st.sampled_from(WRAPPERS),
    st.integers(1, 64),
    st.integers(1, 10**6),
    st.floats(0, 1),
    st.booleans(),
)
def test_each_policy_sends_at_most_what_the_one_before_it_sends(
    wrapper: str, steps: int, size: int, root: float, reshard: bool
) -> None:
    model = Model(size, round(size * root), reshard=reshard)
    most, *fewer = [volume(model, wrapper, policy, steps, 4) for policy in (EACH, *POLICIES)]
    for less in fewer:
        assert all(one <= other for one, other in zip(less, most, strict=True))
        most = less
    longer = volume(model, wrapper, "speed", steps + 1, 4)
    assert wrapper == "fsdp1" or longer == volume(model, wrapper, "speed", 1, 4)  # a window of any length


# -- time -------------------------------------------------------------------------------------------------------------


def ddp(compute: float = 12.0, cluster: Cluster = SMALL) -> Job:
    return Job(MODEL, "ddp", cluster, compute)


def sharded(wrapper: str = "fsdp2", compute: float = 3.0, cluster: Cluster = SMALL, model: Model = MODEL) -> Job:
    return Job(model, wrapper, cluster, compute, cluster.ranks if wrapper.startswith("fsdp") else 2)


def test_a_ring_over_two_nodes_of_two_ranks_by_hand() -> None:
    # 4,000 bytes: each rank sends 2 x 3/4 of them, one of the two of a node to the other node
    found = forecast(ddp(), "balanced", 2)
    assert found.sent == Volume(0, 0, 6000)
    assert (found.within, found.between) == (3000, 3000)
    assert found.sending == 6000 / 1e3  # both ranks' halves on the node's link, which is the slower one


def four_buckets(compute: float) -> Job:
    """A model of four buckets of DDP, whose reduction takes 6 seconds."""
    size = 4 * 25 * 2**20
    return Job(Model(size // 4), "ddp", replace(SMALL, within=math.inf, between=1.5 * size / 6), compute)


def test_all_but_the_last_bucket_hides_behind_a_long_backward() -> None:
    found = forecast(four_buckets(compute=12), "balanced", 2)
    assert found.sending == 6
    assert found.seconds == 2 * 12 + 6 / 4
    assert found.efficiency == 24 / 25.5


def test_what_does_not_hide_behind_the_boundarys_backward_is_waited_for_once() -> None:
    found = forecast(four_buckets(compute=3), "balanced", 4)  # backward takes 2 s, its first bucket is ready after 0.5
    assert found.seconds == 4 * 3 + (0.5 + 6 - 2)
    assert forecast(four_buckets(compute=3), EACH, 4).seconds == 4 * (3 + 4.5)


def test_a_model_of_one_bucket_hides_nothing() -> None:
    assert forecast(ddp(compute=12), "balanced", 2).seconds == 2 * 12 + 6


def test_without_overlap_every_collective_is_waited_for() -> None:
    for job in (four_buckets(compute=12), sharded()):
        found = forecast(replace(job, overlap=False), "balanced", 3)
        assert found.seconds == pytest.approx(3 * job.compute + found.sending)


def test_within_a_node_the_ranks_own_links_set_the_pace() -> None:
    found = forecast(ddp(cluster=replace(SMALL, nodes=1)), "balanced", 1)
    assert (found.within, found.between) == (4000, 0)
    assert found.sending == 4000 / 1e4


def test_one_rank_sends_nothing() -> None:
    for wrapper in WRAPPERS:
        cluster = Cluster(1, 1, 1.0, 1.0, 1.0)
        found = forecast(Job(MODEL, wrapper, cluster, 1.0, 1), "balanced", 8)
        assert (sum(found.sent), found.sending, found.efficiency) == (0, 0, 1)


def test_a_step_costs_a_latency_and_a_tree_has_fewer_of_them() -> None:
    wide = Cluster(nodes=32, ranks_per_node=32, within=math.inf, between=math.inf, latency=1.0)
    assert forecast(ddp(cluster=wide), "balanced", 1).sending == 2 * 10  # one bucket up and down a tree of 1,024 ranks
    found = parts(sharded(cluster=wide), "balanced")
    assert found == Parts(5 * 1023, 0, 4 * 1023, 4 * 1023 + 5 * 1023)  # a ring; four layers and the root


def test_the_parts_of_fsdp2_and_the_window_made_of_them() -> None:
    # 3/4 of 2,000 and of 4,000 bytes over a link of 1,000 bytes/s; the layers are 800 of 1,000 parameters
    gather, again, scatter = 1.5, 1.2, 3.0
    assert parts(sharded(), "memory") == Parts(gather, gather, again + scatter, again + scatter)
    assert parts(sharded(), "balanced") == Parts(gather, 0, again, again + scatter)
    assert parts(sharded(), "speed") == Parts(gather, 0, 0, scatter)
    found = forecast(sharded(), "balanced", 3)  # forward takes 1 s and backward 2 s
    forward, backward, boundary = (
        1 / 5 + gather,
        2 + again / 5,
        2 / 5 + again + scatter,
    )  # one of five units is not hidden
    assert found.seconds == pytest.approx((forward + backward) + (1 + backward) + (1 + boundary))
    assert found.sending == pytest.approx(gather + 3 * again + scatter)


def test_hsdp_gathers_inside_a_node_and_sums_between_nodes() -> None:
    found = forecast(sharded("hsdp"), "balanced", 1)
    assert found.sent == Volume((2000 + 1600) / 2, 4000 / 2, 2 * 2000 / 2)
    assert found.between == 2000  # each rank's own all-reduce, which has one rank on each node
    summed = 2000 * 2 / 1e3  # and both ranks of the node at once
    assert parts(sharded("hsdp"), "balanced").boundary_backward == pytest.approx(800e-4 + 2000e-4 + summed)


def test_copies_of_two_nodes_are_gathered_over_the_slow_link() -> None:
    cluster = replace(SMALL, nodes=4)
    found = forecast(Job(MODEL, "hsdp", cluster, 3.0, shards=4), "speed", 1)
    assert found.sent == Volume(2000 * 3 / 4, 4000 * 3 / 4, 2 * 1000 / 2)
    assert found.between == (1500 + 3000) / 2 + 1000


@given(
    st.sampled_from(WRAPPERS),
    st.sampled_from((EACH, *POLICIES)),
    st.floats(1e-3, 10),
    st.floats(1e2, 1e9),
    st.integers(1, 6),
    st.integers(1, 50),
)
def test_longer_windows_are_never_less_efficient_and_approach_the_limit(
    wrapper: str, policy: str, compute: float, between: float, nodes: int, steps: int
) -> None:
    job = sharded(wrapper, compute, replace(SMALL, between=between, nodes=nodes))
    job = replace(job, shards=1) if wrapper == "ddp" else job
    one, two = (forecast(job, policy, n).efficiency for n in (steps, steps + 1))
    assert 0 < one <= two * (1 + 1e-9) <= limit(job, policy) * (1 + 1e-8) <= 1 + 1e-7
    faster = replace(job, cluster=replace(job.cluster, between=2 * between))
    assert forecast(faster, policy, steps).efficiency >= one * (1 - 1e-9)


@given(
    st.sampled_from(("ddp", "fsdp2")),
    st.sampled_from(POLICIES),
    st.floats(1e-2, 10),
    st.floats(0.05, 0.99),
)
def test_the_recommended_window_is_the_first_that_reaches_the_efficiency(
    wrapper: str, policy: str, compute: float, wanted: float
) -> None:
    job = ddp(compute) if wrapper == "ddp" else sharded(wrapper, compute)
    found = smallest(job, policy, wanted)
    if found is None:
        assert forecast(job, policy, LONGEST).efficiency < wanted * (1 + 1e-9)
    else:
        assert forecast(job, policy, found).efficiency >= wanted
        assert found == 1 or forecast(job, policy, found - 1).efficiency < wanted


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (units.parameters, "7B", 7_000_000_000),
        (units.parameters, "1.3G", 1_300_000_000),
        (units.parameters, "350M", 350_000_000),
        (units.parameters, "12345", 12345),
        (units.bandwidth, "400Gbit/s", 50e9),
        (units.bandwidth, "400 Gbps", 50e9),
        (units.bandwidth, "50GB/s", 50e9),
        (units.bandwidth, "100Mbit/s", 12.5e6),
        (units.duration, "430ms", 0.43),
        (units.duration, "10us", 10e-6),
        (units.duration, "1.5s", 1.5),
        (units.duration, "0s", 0.0),
        (units.share, "0.95", 0.95),
        (units.share, ".5", 0.5),
        (units.dtype, "bf16", 2),
    ],
)
def test_sizes_are_read_as_people_write_them(read: Callable[[str], float], text: str, expected: float) -> None:
    assert read(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (units.parameters, "7 billion"),
        (units.parameters, "-7B"),
        (units.parameters, ""),
        (units.bandwidth, "400G"),
        (units.bandwidth, "0Gbit/s"),
        (units.bandwidth, "fast"),
        (units.duration, "430"),
        (units.duration, "-1s"),
        (units.share, "95"),
        (units.share, "95%"),
        (units.share, "0"),
        (units.share, "1"),
        (units.share, "nan"),
        (units.dtype, "float32"),
        (units.count, "0"),
        (units.count, "1.5"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_value(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected .* got") as refused:
        read(text)
    assert repr(text) in str(refused.value)


# -- the command ------------------------------------------------------------------------------------------------------

CLUSTER = ["--nodes", "8", "--ranks-per-node", "8", "--between", "400Gbit/s", "--compute", "430ms"]
DTYPES = ["--param-dtype", "bf16", "--reduce-dtype", "fp32"]
SEVEN = ["plan", "--parameters", "7B", *DTYPES, "--wrapper", "fsdp2", *CLUSTER]


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: --compute"),
        (["--compute", "1"], "expected a time such as 0.4s, 350ms or 10us, got '1'"),
        (["--compute", "0s", "--parameters", "7B"], "--compute must be above 0"),
        (["--compute", "1s"], "either by --parameters, such as 7B, or by --width"),
        (["--compute", "1s", "--parameters", "7B", "--width", "4096"], "either by --parameters"),
        (["--compute", "1s", "--parameters", "0"], "a model of 0 parameters"),
        (["--compute", "1s", "--parameters", "1M", "--root", "2M"], "cannot have a root unit of 2,000,000"),
        (["--compute", "1s", "--parameters", "7B", "--shard", "8"], "--shard is for --wrapper hsdp; ddp has no"),
        (["--compute", "1s", "--parameters", "7B", "--wrapper", "hsdp", "--shard", "3"], "--shard 3 does not divide 8"),
        (
            ["--compute", "1s", "--parameters", "7B", "--wrapper", "hsdp", "--nodes", "3", "--shard", "12"],
            "--shard 12 does not divide 24 ranks in whole nodes",
        ),
        (["--compute", "1s", "--parameters", "7B", "--param-dtype", "bf16"], "ddp gathers nothing"),
        (["--compute", "1s", "--parameters", "7B", "--no-reshard-after-forward"], "ddp gathers nothing"),
        (["--wrapper", "zero"], "invalid choice: 'zero'"),
        (["--policy", "fast"], "invalid choice: 'fast'"),
        (["--steps", "0"], "expected a whole number of at least 1, got '0'"),
        (["--between", "400"], "expected a bandwidth above 0 such as 400Gbit/s"),
        (["--compute", "1s", "--parameters", "7B", "--plot", "p.svg"], "--plot writes a PNG"),
        (
            ["--compute", "1s", "--parameters", "7B", "--json", "no/such/out.json"],
            "the folder 'no/such' does not exist",
        ),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "missing", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([*SEVEN, "--plot", "x.png"])
    assert "pip install 'torch-accumulate[bench]'" in capsys.readouterr().err


def test_help_teaches_by_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    for word in ("2(n-1)/n", "2/3", "exit status", "hsdp", "optimizer's step"):
        assert word in text
    command = text.split("python -m accumulate plan --parameters", 1)[1].split("\n\n")[0].replace("\\\n", " ")
    assert main(["plan", "--parameters", *command.split()]) == 0
    assert "balanced: steps=" in capsys.readouterr().out


def test_the_table_is_plain_text_with_a_row_for_each_window_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN, "--steps", "4", "1", "--policy", "speed", "memory"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    rows = [line.split()[:2] for line in out.splitlines() if line.strip()[:1].isdigit() and "ranks" not in line]
    assert rows == [["1", "speed"], ["1", "memory"], ["4", "speed"], ["4", "memory"]]
    assert "speed: steps=20 is the smallest window that reaches 95%" in out
    assert "memory: no window reaches 95%; longer ones approach 36.5%." in out
    assert "all-reduced" not in out  # nothing of that kind is sent


def test_a_policy_that_gathers_too_much_is_answered_by_one_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN, "--policy", "memory"]) == 0
    assert "--policy speed does not, if the memory allows it" in capsys.readouterr().out
    assert main([*SEVEN, "--wrapper", "fsdp1", "--efficiency", "0.999"]) == 0
    assert "fully_shard with --policy speed" in capsys.readouterr().out
    assert main(["plan", "--parameters", "7B", *CLUSTER, "--efficiency", "0.9999999"]) == 0
    assert "too small for these links" in capsys.readouterr().out


def test_the_json_holds_every_number_and_names_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *SEVEN, "--steps", "8", "--policy", "balanced", "speed")
    assert sorted(found) == ["accumulate", "efficiency", "job", "limit", "memory", "recommended", "results"]
    assert found["recommended"]["speed"] == 20
    assert found["memory"]["speed"]["unsharded"] == 14e9
    assert [entry["policy"] for entry in found["results"]] == ["balanced", "speed", EACH]
    speed = found["results"][1]
    assert speed["payload_bytes"] == {"all_gather": 14e9, "reduce_scatter": 28e9, "all_reduce": 0}
    assert speed["sent_bytes"]["all_gather"] == 14e9 * 63 / 64
    assert speed["microbatches_per_update"] == 512
    total = sum(speed["sent_bytes"][kind] for kind in Volume._fields)
    assert speed["sent_bytes"]["within"] + speed["sent_bytes"]["between"] == pytest.approx(total)


def test_layers_and_width_stand_for_a_size_and_dtypes_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["plan", "--layers", "32", "--width", "4096", "--compute", "1s", "--wrapper", "fsdp2"]
    model = document(capsys, *shape)["job"]["model"]
    assert model["parameters"] == 32 * 12 * 4096**2 + 2 * 32000 * 4096
    assert model["root"] == 2 * 32000 * 4096
    assert (model["stored"], model["gathered"], model["reduced"]) == (4, 4, 4)
    model = document(capsys, *shape, "--param-dtype", "bf16", "--root", "1M")["job"]["model"]
    assert (model["stored"], model["gathered"], model["reduced"], model["root"]) == (4, 2, 2, 10**6)
    model = document(capsys, *SEVEN[:3], "--compute", "1s", "--dtype", "bf16")["job"]["model"]
    assert (model["stored"], model["reduced"], model["root"]) == (2, 2, 0)


def test_hsdp_holds_a_copy_on_each_node_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--parameters", "7B", "--wrapper", "hsdp", *CLUSTER]
    assert document(capsys, *arguments)["job"]["shards"] == 8
    assert document(capsys, *arguments, "--shard", "16")["job"]["shards"] == 16
    assert document(capsys, *arguments, "--shard", "4")["job"]["shards"] == 4


def test_the_worst_case_is_one_without_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    best, worst = (document(capsys, *SEVEN, *more)["results"][0] for more in ([], ["--no-overlap"]))
    assert best["window_seconds"] < worst["window_seconds"]
    assert worst["window_seconds"] == pytest.approx(0.43 + worst["communication_seconds"])


def test_ddp_has_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", "--parameters", "1B", *CLUSTER, "--policy", *POLICIES)
    assert list(found["recommended"]) == ["balanced"]


def test_files_are_written_and_one_that_cannot_be_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture, numbers = tmp_path / "p.png", tmp_path / "p.json"
    assert main([*SEVEN, "--plot", str(picture), "--json", str(numbers)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads(numbers.read_text())["recommended"] == {"balanced": 174}
    numbers.unlink()
    numbers.mkdir()
    capsys.readouterr()
    assert main([*SEVEN, "--json", str(numbers)]) == 1
    assert capsys.readouterr().err.startswith("python -m accumulate plan: [Errno")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_rich_draws_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    parser = argparse.ArgumentParser()
    arguments.declare(parser)
    stream = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    report.write(arguments.options(parser.parse_args(SEVEN[1:]), parser), stream)
    assert "┃" in stream.getvalue()
    assert "balanced: steps=174" in stream.getvalue()


def test_a_forecast_splits_what_it_sends() -> None:
    found = Forecast(Volume(), Volume(1.0, 2.0, 3.0), between=4.0, sending=0.0, seconds=1.0, efficiency=1.0)
    assert found.within == 2.0
