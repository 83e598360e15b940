"""The proof that the tests can fail: one-line faults in the library, and for each the test that must notice it.

    python tests/mutants.py            every mutant, after checking that the named tests pass without one
    python tests/mutants.py restore    those whose name contains "restore"

The package that this interpreter imports is copied to a temporary folder, one edit is applied to the copy, and the
named test runs against it. A test that passes all the same is a mutant that survived, and the exit code says so.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["MUTANTS", "Mutant", "package"]

TESTS = Path(__file__).parent
SECONDS = 240
"""A mutant may hang its ranks; each run inside is shorter, see ``support/ranks.py``."""


class Mutant(NamedTuple):
    """One fault: what a careless author might have written instead, and the test that must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


CASES, DDP, FSDP = "unit/test_cases.py::", "distributed/test_cases_ddp.py::", "distributed/test_cases_fsdp.py::"
PLAN = "unit/test_plan.py::"
BAD, CONFORMS = "unit/test_bad_input.py::", "distributed/test_conformance.py::test_conforms"
MISTAKE = BAD + "test_a_mistake_is_named_with_its_value_and_leaves_the_model_unharmed"

MUTANTS = (
    # -- the formula
    Mutant(
        "drop the factor R",
        "_scaling.py",
        "ranks / (scale * total)",
        "1 / (scale * total)",
        DDP + "test_case_2_only_the_total_over_ranks_is_right",
    ),
    Mutant(
        "weights do not scale the loss",
        "_scaling.py",
        "else scale * weight",
        "else scale",
        CASES + "test_case_1_ragged_micro_batches_weighted_by_their_length",
    ),
    Mutant(
        "a sum is weighted like a mean",
        "_scaling.py",
        'weight is None or reduction == "sum"',
        "weight is None",
        CASES + "test_case_6_a_sum_type_loss_is_divided_by_all_items",
    ),
    Mutant(
        "a zero weight multiplies NaN",
        "_scaling.py",
        "if isinstance(weight, Tensor):",
        "if False:",
        CASES + "test_case_10_an_all_ignored_cross_entropy_contributes_nothing",
    ),
    Mutant(
        "total weight 0 divides by 0",
        "_scaling.py",
        "torch.where(total > 0, ranks / (scale * total), torch.zeros_like(total))",
        "ranks / (scale * total)",
        CASES + "test_case_10_a_window_of_weight_zero_is_a_zero_gradient_and_a_zero_loss",
    ),
    Mutant(
        "weights summed on one rank",
        "_ranks.py",
        "Sum(() if local else self.groups,",
        "Sum((),",
        DDP + "test_case_2_only_the_total_over_ranks_is_right",
    ),
    Mutant(
        "one mesh dimension summed",
        "_ranks.py",
        "for group in self._groups[1:]:",
        "for group in ():",
        CONFORMS + "[hsdp-inside-weighted-3+3+3]",
    ),
    Mutant(
        "R is the world's size",
        "_ranks.py",
        "self.size *= each.size()",
        "self.size *= dist.get_world_size()",
        CONFORMS + "[ddp-subgroup-inside-weighted-3+3+3]",
    ),
    Mutant(
        "a plain model is corrected by other ranks' weights",
        "_correction.py",
        "if gradients.is_wrapped or self._ranks.chosen:",
        "if True:",
        DDP + "test_case_29_a_list_of_a_plain_and_a_wrapped_model",
    ),
    Mutant(
        "divide by steps, not by what the window holds",
        "_correction.py",
        "if tally.weighted is None or not (tally.weighted or tally.by_hand):",
        "if not tally.weighted:",
        CASES + "test_case_8_a_short_last_window_closed_by_flush_is_its_own_mean",
    ),
    Mutant(
        "a window closed by hand is not corrected",
        "_windows.py",
        "tally.commit(self._explicit)",
        "tally.commit(False)",
        CASES + "test_case_17_the_caller_owns_the_boundary",
    ),
    Mutant(
        "corrected although the user scales",
        "_correction.py",
        "if tally.weighted is None or not (tally.weighted or tally.by_hand):",
        "if False:",
        DDP + "test_a_full_window_without_weights_sends_the_gradient_and_nothing_else",
    ),
    # -- windows
    Mutant(
        "pause the last micro-batch",
        "_windows.py",
        "tally.position + 1 >= tally.steps",
        "tally.position + 1 > tally.steps",
        CASES + "test_case_19_and_20_an_update_is_taken_at_boundaries_only",
    ),
    Mutant(
        "drop the pause",
        "_windows.py",
        "self._begin_controls(reduce)",
        "self._begin_controls(True)",
        DDP + "test_case_12_backward_alone_inside_reduces_as_if_both_were",
    ),
    Mutant(
        "the tally of a window goes on",
        "_windows.py",
        "self.open, self.closed = None, tally",
        "self.closed = tally",
        CASES + "test_case_5_equal_windows_give_equal_gradients",
    ),
    Mutant(
        "a dropped boundary is not reduced",
        "_drop.py",
        "for control in self._controls if boundary else ():",
        "for control in ():",
        DDP + "test_case_10_a_nan_loss_of_weight_zero_contributes_nothing",
    ),
    Mutant(
        "cleared gradients go unnoticed",
        "_windows.py",
        "if not tally.position:\n            return\n",
        "if True:\n            return\n",
        CASES + "test_case_18_clearing_gradients_in_every_iteration_is_an_error",
    ),
    Mutant(
        "clearing inside a block goes unnoticed",
        "_windows.py",
        "if tally.position and not tally.terms:",
        "if False:",
        CASES + "test_case_18_clearing_gradients_at_the_top_of_the_block_is_an_error",
    ),
    Mutant(
        "a failed micro-batch is counted",
        "_windows.py",
        "if failed or tally.broken:",
        "if False:",
        CASES + "test_case_27_an_exception_in_the_second_micro_batch",
    ),
    Mutant(
        "a window that an exception broke goes on",
        "_windows.py",
        "if tally.broken:",
        "if False:",
        CASES + "test_case_27_an_exception_in_the_first_micro_batch_breaks_the_window_too",
    ),
    Mutant(
        "reset keeps the gradients",
        "_windows.py",
        "            gradients.drop()",
        "            pass",
        CASES + "test_case_27_an_exception_in_the_second_micro_batch",
    ),
    Mutant(
        "blocks may be nested",
        "_windows.py",
        "if self._thread is not None:\n            where",
        "if False:\n            where",
        MISTAKE + "[nested]",
    ),
    Mutant(
        "a boundary without a reduction passes",
        "_windows.py",
        "elif not control.finish():",
        "elif control.finish() is None:",
        DDP + "test_case_15_calling_the_module_inside_ddp_is_an_error_at_the_boundary",
    ),
    Mutant(
        "a graph that may still run backward is forgotten",
        "wrappers/ddp.py",
        "len(self._late) == self.backwards == 1 and",
        "",
        "distributed/test_review.py::"
        "test_a_graph_from_off_the_boundary_reduces_when_its_backward_comes_after_the_window",
    ),
    Mutant(
        "a control is not told of the end",
        "_windows.py",
        "control.end()\n        if self._drop.is_used",
        "None if failed else control.end()\n        if self._drop.is_used",
        FSDP + "test_flags_are_put_back_to_what_was_there_after_each_block_and_after_an_exception",
    ),
    Mutant(
        "new steps take effect in mid-window",
        "_windows.py",
        "tally.position + 1 >= tally.steps",
        "tally.position + 1 >= self.steps",
        CASES + "test_case_26_a_new_length_takes_effect_at_the_next_window",
    ),
    Mutant(
        "ranks may disagree",
        "_ranks.py",
        "if theirs[key] != first:",
        "if False:",
        DDP + "test_case_34_unequal_steps_are_an_error_on_both_ranks_at_construction",
    ),
    # -- the update
    Mutant(
        "the optimizer steps off the boundary",
        "_accumulator.py",
        'if not self._windows.at_boundary("optimizer_step"):',
        "if False:",
        CASES + "test_case_19_and_20_an_update_is_taken_at_boundaries_only",
    ),
    Mutant(
        "clipping works in mid-window",
        "_accumulator.py",
        'self._windows.require_boundary("clip_grad_norm_")',
        "pass",
        CASES + "test_case_54_clipping_in_mid_window_raises",
    ),
    Mutant(
        "the norm is a shard's",
        "wrappers/fsdp1.py",
        "module.process_group if True in sharded else None",
        "None",
        FSDP + "test_case_36_the_norm_under_fsdp1_is_the_oracles",
    ),
    Mutant(
        "the gradient is not clipped",
        "_accumulator.py",
        "gradients.clip(max_norm, self._grad_norm)",
        "pass",
        CASES + "test_case_36_clipped_once_at_the_boundary_after_scaling",
    ),
    Mutant(
        "the loss keeps its graph",
        "_tally.py",
        "self._micro_losses.append(scaled.detach())\n            return",
        "self._micro_losses.append(scaled)\n            return",
        CASES + "test_case_51_the_reported_loss_is_the_weighted_mean",
    ),
    # -- wrappers
    Mutant(
        "only look at the root",
        "_sync.py",
        "in model.named_modules():",
        'in [("", model)]:',
        DDP + "test_case_29_ddp_anywhere_in_the_model_reduces_right",
    ),
    Mutant(
        "strangers are let through",
        "_sync.py",
        "            if control is None:\n                _refuse_unknown(name, module)",
        "            if control is None:\n                pass",
        MISTAKE + "[stranger]",
    ),
    Mutant(
        "hooks stay after close",
        "_sync.py",
        "hook.remove()",
        "pass",
        DDP + "test_after_the_end_the_model_is_as_it_was_found",
    ),
    Mutant(
        "forget to restore DDP's flag",
        "wrappers/ddp.py",
        'self._attributes["require_backward_grad_sync"] = self._flag',
        "pass",
        DDP + "test_case_48_an_exception_off_the_boundary_then_a_backward_without_the_library",
    ),
    Mutant(
        "an unreduced bucket passes",
        "wrappers/ddp.py",
        "        try:\n            self.ddp.reducer._check_reducer_finalized()\n        except RuntimeError as error:",
        "        try:\n            pass\n        except RuntimeError as error:",
        DDP + "test_case_42_the_same_without_the_flag_is_an_error_before_the_update",
    ),
    Mutant(
        "buckets are not rebuilt",
        "wrappers/ddp.py",
        "self.ddp.reducer._rebuild_buckets()  # else a second",
        "pass  # else a second",
        DDP + "test_case_14_one_forward_two_losses_two_backwards_at_the_boundary",
    ),
    Mutant(
        "buckets wait for the next forward",
        "wrappers/ddp.py",
        "        self.ddp.reducer._rebuild_buckets()\n        return True",
        "        return True",
        DDP + "test_case_8_flush_with_unequal_counts_and_one_rank_without_any",
    ),
    Mutant(
        "static graphs are deferred",
        "wrappers/ddp.py",
        "ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued",
        "False",
        DDP + "test_case_40_static_graph_is_right_from_the_first_window_on",
    ),
    Mutant(
        "arm without the outputs",
        "wrappers/ddp.py",
        "self.ddp.reducer.prepare_for_backward(outputs)",
        "self.ddp.reducer.prepare_for_backward([])",
        DDP + "test_case_41_branches_crossed_between_ranks",
    ),
    Mutant(
        "backward outside blocks is paused as well",
        "wrappers/ddp.py",
        "if task != self._task and False not in self._blocks:",
        "if task != self._task and self._blocks == [True]:",
        DDP + "test_a_backward_between_windows_is_plain_ddp",
    ),
    Mutant(
        "forward decides",
        "wrappers/ddp.py",
        "if task != self._task and False not in self._blocks:",
        "if task != self._task:",
        DDP + "test_case_13_forward_in_one_block_and_backward_in_the_next",
    ),
    Mutant(
        "restore from the argument",
        "wrappers/fsdp2.py",
        "                reshard,\n            )",
        "                True,\n            )",
        FSDP + "test_flags_are_put_back_to_what_was_there_after_each_block_and_after_an_exception",
    ),
    Mutant(
        "hidden sums survive a reset",
        "wrappers/fsdp2.py",
        "unsharded.grad = None",
        "pass",
        FSDP + "test_reset_drops_the_sums_that_fully_shard_hides",
    ),
    Mutant(
        "inner units are steered by themselves",
        "wrappers/fsdp2.py",
        "covers_subtree = True",
        "covers_subtree = False",
        CONFORMS + "[fsdp2-inside-mean-3+3+3]",
    ),
    Mutant(
        "parameters are resharded after each backward",
        "wrappers/fsdp2.py",
        "group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False",
        "group.reduce_grads = group.all_reduce_grads = False",
        FSDP + "test_parameters_are_gathered_no_more_often_than_the_design_says",
    ),
    Mutant(
        "FSDP1 reduces each micro-batch",
        "wrappers/fsdp1.py",
        "module._sync_gradients = False",
        "pass",
        CONFORMS + "[fsdp1-full-inside-mean-3+3+3]",
    ),
    # -- the plan
    Mutant(
        "plan: balanced gathers in each forward",
        "plan/volume.py",
        "return Schedule(everything, 0, 0 if",
        "return Schedule(everything, everything, 0 if",
        PLAN + "test_a_window_of_three_hands_over_what_the_policy_table_says",
    ),
    Mutant(
        "plan: DDP under memory reduces each micro-batch",
        "plan/volume.py",
        "return Schedule(sums_each=each)",
        "return Schedule(sums_each=each or policy == POLICIES[0])",
        PLAN + "test_a_window_of_three_hands_over_what_the_policy_table_says",
    ),
    Mutant(
        "plan: FSDP1 sums in the dtype of reductions",
        "plan/volume.py",
        'size * (model.gathered if wrapper == "fsdp1" else model.reduced)',
        "size * model.reduced",
        PLAN + "test_a_rank_holds_shards_and_what_the_policy_keeps",
    ),
    Mutant(
        "plan: a ring sends the whole payload",
        "plan/cost.py",
        "passes * payload * (group.size - 1) / group.size",
        "passes * payload",
        PLAN + "test_a_ring_over_two_nodes_of_two_ranks_by_hand",
    ),
    Mutant(
        "plan: each rank has the node's link to itself",
        "plan/cost.py",
        "_between(moved, group) * cluster.ranks_per_node / cluster.between",
        "_between(moved, group) / cluster.between",
        PLAN + "test_a_ring_over_two_nodes_of_two_ranks_by_hand",
    ),
    Mutant(
        "plan: the last bucket hides as well",
        "plan/cost.py",
        "max(compute + share * communication, share * compute + communication)",
        "max(compute, communication)",
        PLAN + "test_all_but_the_last_bucket_hides_behind_a_long_backward",
    ),
    Mutant(
        "plan: the recommended window is one too long",
        "plan/cost.py",
        "range(max(1, about - 1), about + 2)",
        "range(max(1, about + 1), about + 2)",
        PLAN + "test_the_recommended_window_is_the_first_that_reaches_the_efficiency",
    ),
    # -- arguments
    Mutant("True is a number of steps", "_arguments.py", "isinstance(steps, bool) or ", "", MISTAKE + "[steps True]"),
    Mutant("0 is a number of steps", "_arguments.py", "if steps < 1:", "if steps < 0:", MISTAKE + "[steps 0]"),
    Mutant("weights may be negative", "_arguments.py", " or weight < 0", "", MISTAKE + "[weight -1]"),
    Mutant(
        "a part of a model may come twice",
        "_arguments.py",
        "!= index:",
        "!= index and False:",
        MISTAKE + "[a part twice]",
    ),
)


def package() -> Path:
    """The folder of the package that this interpreter imports."""
    spec = importlib.util.find_spec("accumulate")
    if spec is None or spec.origin is None:
        raise SystemExit("accumulate is not importable here; install it first (see CONTRIBUTING.md)")
    return Path(spec.origin).parent


@contextmanager
def mutated(mutant: Mutant | None) -> Iterator[Path]:
    """A folder with a copy of the package in which one text is replaced."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "accumulate")
        shutil.copytree(package(), copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            source = copy / mutant.file
            text = source.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.name}: {mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times")
            source.write_text(text.replace(mutant.old, mutant.new))
        yield Path(folder)


def passes(tests: Iterable[str], folder: Path) -> bool:
    """Whether these tests pass against the package in ``folder``; anything but passed or failed ends the command."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
    ids = [str(TESTS / test) for test in tests]
    with tempfile.TemporaryDirectory() as elsewhere:  # `-m` puts the current folder on the path: not the source tree's
        done = subprocess.run(
            [*command, f"--rootdir={TESTS.parent}", f"--config-file={TESTS.parent / 'pyproject.toml'}", *ids],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": path, "RANKS_SECONDS": "30"},
            capture_output=True,
            text=True,
            timeout=SECONDS * (1 + len(ids) // 10),
        )
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {ids}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return done.returncode == 0


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.name for word in words)]
    tests = sorted({mutant.test for mutant in chosen})
    with mutated(None) as folder:
        if not passes(tests, folder):
            raise SystemExit("these tests fail without any mutant:\n" + "\n".join(tests))
    survivors = []
    for mutant in chosen:
        with mutated(mutant) as folder:
            survived = passes([mutant.test], folder)
        survivors += [mutant.name] if survived else []
        print(f"{'SURVIVED' if survived else 'killed  '}  {mutant.name}  by  {mutant.test}", flush=True)  # noqa: T201 - a command
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")  # noqa: T201 - a command
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
