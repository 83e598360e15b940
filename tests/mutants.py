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
SCALER, SCALED_RANKS = "unit/test_scaler.py::", "distributed/test_scaler.py::"
PLAN = "unit/test_plan.py::"
BAD, CONFORMS = "unit/test_bad_input.py::", "distributed/test_conformance.py::test_conforms"
BATCHES, AHEAD = "distributed/test_batches.py::", "unit/test_batches.py::"
FAULTS = "distributed/test_faults.py::"
CHECK = "unit/test_check.py::"
CAUSE = CHECK + "test_the_cause_is_told"
POLICIES, VERIFY = "distributed/test_policies.py::", "distributed/test_verify.py::"
GUARDS = "unit/test_guards.py::"
STATE, RANKS_STATE = "unit/test_state.py::", "distributed/test_state.py::"
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
        "for group in groups:  # both",
        "for group in groups[:1]:  # both",
        CONFORMS + "[hsdp-inside-weighted-3+3+3]",
    ),
    Mutant(
        "R is the world's size",
        "_ranks.py",
        "self.size * each.size(), self.index",
        "self.size * dist.get_world_size(), self.index",
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
        "if tally.is_exact:\n            self._correct_unwrapped",
        "if tally.is_exact or not tally.weighted:\n            self._correct_unwrapped",
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
        "if tally.is_exact:\n            self._correct_unwrapped",
        "if False:\n            self._correct_unwrapped",
        DDP + "test_a_full_window_without_weights_sends_the_gradient_and_nothing_else",
    ),
    # -- batches
    Mutant(
        "padding counts",
        "_tally.py",
        "self.padded += self.padding",
        "self.padded += 0",
        BATCHES + "test_loss_reports_leave_padding_out",
    ),
    Mutant(
        "padding contributes",
        "_drop.py",
        "control.drop = True",
        "control.drop = False",
        BATCHES + "test_a_backward_without_the_library_contributes_nothing_in_a_padding_batch",
    ),
    Mutant(
        "padding moves running statistics",
        "_lookahead.py",
        "buffer.copy_(before)",
        "pass",
        BATCHES + "test_padding_does_not_move_running_statistics",
    ),
    Mutant(
        "a short window is divided by a full one",
        "_tally.py",
        "1.0 / steps if self.planned is None else ranks / self.planned",
        "1.0 / steps",
        BATCHES + "test_case_33_unequal_ranks_give_the_gradient_over_all_samples",
    ),
    Mutant(
        "a window is as long as this rank's data",
        "_batches.py",
        "length = max(counts)",
        "length = min(counts)",
        BATCHES + "test_case_33_unequal_ranks_give_the_gradient_over_all_samples",
    ),
    Mutant(
        "a carried window is thought whole",
        "_tally.py",
        "self.by_hand = self.rest is None or not self.rest.is_what_comes(plan)",
        "pass",
        AHEAD + "test_case_21_carry_lets_windows_straddle_epochs",
    ),
    Mutant(
        "a loop left in mid-window is forgotten",
        "_loops.py",
        "if window is not None and not finished:",
        "if False:",
        AHEAD + "test_case_24_a_loop_left_in_mid_window_is_not_inherited",
    ),
    Mutant(
        "a wrong len is believed",
        "_lookahead.py",
        "if self._lengths is not None and self._stream.available(1):",
        "if False:",
        AHEAD + "test_a_wrong_length_is_an_error",
    ),
    Mutant(
        "auxiliary losses share the weights' denominator",
        "_tally.py",
        "scaled_loss(loss, self.count_scale, None, reduction)",
        "scaled_loss(loss, self.scale, None, reduction)",
        AHEAD + "test_case_7_a_per_token_loss_and_a_mean_type_one_each_have_their_own_denominator",
    ),
    Mutant(
        "the question is asked late",
        "_batches.py",
        "if index + 1 == plan.length:",
        "if False:",
        BATCHES + "test_all_ranks_send_the_same_and_only_what_is_needed",
    ),
    Mutant(
        "the last batch is kept alive",
        "_lookahead.py",
        "self._iterator = iter(())",
        "pass",
        AHEAD + "test_a_kept_traceback_keeps_no_worker_process",
    ),
    # -- policies
    Mutant(
        "memory keeps gradients",
        "wrappers/fsdp2.py",
        "elif not reduce:",
        "if not reduce:",
        POLICIES + "test_case_46_each_policy_sends_the_least_that_it_can",
    ),
    Mutant(
        "speed gathers again",
        "wrappers/fsdp2.py",
        "group.post_forward_mesh_info = None",
        "pass",
        POLICIES + "test_case_46_each_policy_sends_the_least_that_it_can",
    ),
    Mutant(
        "memory reduces between nodes each time",
        "wrappers/fsdp2.py",
        "group.all_reduce_grads = group.all_reduce_grads and reduce",
        "pass",
        POLICIES + "test_case_47_a_2d_mesh_reduces_between_nodes_once",
    ),
    Mutant(
        "units that the boundary does not use are lost on a 2-D mesh",
        "wrappers/fsdp2.py",
        "            if self._is_hybrid:",
        "            if False:",
        POLICIES + "test_units_that_the_boundary_does_not_use_are_reduced_on_a_2d_mesh",
    ),
    Mutant(
        "the root's automatic setting is undone",
        "wrappers/fsdp2.py",
        "if groups and state._is_root is None and state._auto_reshard_after_forward:",
        "if False:",
        POLICIES + "test_flags_are_what_torch_would_have_made_them",
    ),
    # -- guards
    Mutant(
        "an optimizer may step in mid-window",
        "_surroundings.py",
        "if not any(id(p) in self._ids for p in held):",
        "if True:",
        GUARDS + "test_an_optimizer_that_steps_in_mid_window_is_stopped_before_it_does",
    ),
    Mutant(
        "two windows may share parameters",
        "_surroundings.py",
        "if (window := other.window()) is not None:",
        "if False:",
        GUARDS + "test_two_windows_on_the_same_parameters_are_refused",
    ),
    Mutant(
        "a DDP around the model goes unnoticed",
        "_surroundings.py",
        "if distributed.DistributedDataParallel._active_ddp_module is not None:",
        "if False:",
        "distributed/test_guards.py::test_a_wrapper_that_comes_after_the_accumulator_is_an_error",
    ),
    Mutant(
        "gradients are not compared",
        "_verify.py",
        "(highest != -lowest)",
        "(highest != highest)",
        VERIFY + "test_gradients_that_differ_are_an_error_on_every_rank_with_the_parameters_name",
    ),
    Mutant(
        "windows are not compared",
        "_verify.py",
        "if row != rows[0]:",
        "if False:",
        VERIFY + "test_ranks_at_different_places_are_both_named_on_both",
    ),
    # -- state
    Mutant(
        "a state shares its gradients",
        "_state.py",
        "p.grad.detach().clone()",
        "p.grad.detach()",
        STATE + "test_a_state_shares_no_memory_with_what_goes_on",
    ),
    Mutant(
        "what is loaded stays the caller's",
        "_state.py",
        ".to(each.named[k].device, copy=True)",
        ".to(each.named[k].device)",
        STATE + "test_a_state_shares_no_memory_with_what_goes_on",
    ),
    Mutant(
        "loaded gradients are not watched",
        "_state.py",
        "each.remember()",
        "pass",
        STATE + "test_gradients_cleared_after_loading_are_noticed",
    ),
    Mutant(
        "gradients that were not saved stay",
        "_state.py",
        'param.grad = ready["gradients"][each.name].get(name)',
        'param.grad = ready["gradients"][each.name].get(name, param.grad)',
        STATE + "test_parameters_without_a_gradient_and_frozen_ones_stay_so",
    ),
    Mutant(
        "the provisional scale begins anew",
        "_state.py",
        'windows.correction.restore(ready["mean_weight"])',
        "windows.correction.restore(None)",
        STATE + "test_case_49_resumed_anywhere_it_is_bit_equal",
    ),
    Mutant(
        "weights are saved as if none had been seen",
        "_tally.py",
        '        "_weight": (float, Tensor),\n',
        "",
        STATE + "test_case_49_resumed_anywhere_it_is_bit_equal",
    ),
    Mutant(
        "losses are not saved",
        "_tally.py",
        "return _stacked(value) if value else None",
        "return None",
        STATE + "test_case_49_resumed_anywhere_it_is_bit_equal",
    ),
    Mutant(
        "a misfit is loaded",
        "_state.py",
        "if not (found := list(differences(theirs, ours))):",
        "if found := list(differences(theirs, ours)):",
        STATE + "test_partial_gradients_fit_only_where_they_were_made",
    ),
    Mutant(
        "unknown keys are loaded",
        "_schema.py",
        "if unknown := sorted(map(repr, given.keys() - fields.keys())):",
        "if unknown := []:",
        STATE + "test_what_state_dict_did_not_make_is_refused_and_changes_nothing",
    ),
    Mutant(
        "True counts as an int",
        "_schema.py",
        "if type(value) not in types:",
        "if not isinstance(value, types):",
        STATE + "test_what_state_dict_did_not_make_is_refused_and_changes_nothing",
    ),
    Mutant(
        "an open window is overwritten",
        "_state.py",
        "if windows.open is not None:",
        "if False:",
        STATE + "test_an_open_window_is_not_overwritten",
    ),
    Mutant(
        "an update that was due is forgotten",
        "_state.py",
        "windows.is_boundary and gradients and self._is_due()",
        "False",
        STATE + "test_a_gradient_whose_update_is_due_is_in_the_state",
    ),
    Mutant(
        "an update that was taken is taken again",
        "_update.py",
        "if update == self.done:",
        "if False:",
        STATE + "test_an_update_that_has_been_taken_is_not_taken_again",
    ),
    Mutant(
        "fused optimizers take no update",
        "_surroundings.py",
        "self.is_updated = True",
        "pass",
        STATE + "test_an_update_that_has_been_taken_is_not_taken_again",
    ),
    Mutant(
        "optimizers that are not torch's take no update",
        "_gradients.py",
        "and self._closed[0]._version == self._closed[1]",
        "",
        STATE + "test_an_update_that_has_been_taken_is_not_taken_again",
    ),
    Mutant(
        "a loaded window is never what was planned",
        "_lookahead.py",
        "if (plan.length, plan.real) != (self.length, self.real):",
        "if True:",
        STATE + "test_a_loop_over_batches_goes_on_where_it_was_cut",
    ),
    Mutant(
        "a loaded window is always what was planned",
        "_lookahead.py",
        "if (plan.length, plan.real) != (self.length, self.real):",
        "if False:",
        STATE + "test_a_window_that_goes_on_with_other_data_than_planned_is_still_exact",
    ),
    Mutant(
        "a rank loads what another cannot",
        "_agreement.py",
        "if each.problem is not None:",
        "if False:",
        RANKS_STATE + "test_what_one_rank_cannot_load_no_rank_loads",
    ),
    Mutant(
        "states of different moments are mixed",
        "_agreement.py",
        "if here != there:",
        "if False:",
        RANKS_STATE + "test_states_of_different_moments_are_refused",
    ),
    Mutant(
        "another rank's loss is reported",
        "_state.py",
        'ready["closed"] if all(report.is_own for report in every) else None',
        'ready["closed"]',
        RANKS_STATE + "test_at_a_boundary_all_ranks_may_load_the_state_of_one",
    ),
    Mutant(
        "buckets are derived anew",
        "wrappers/_ddp_resume.py",
        "self._ddp.reducer._rebuild_buckets()",
        "pass",
        RANKS_STATE + "test_on_more_than_two_ranks_gradients_add_up_in_the_same_order",
    ),
    Mutant(
        "buffers are broadcast again",
        "wrappers/_ddp_resume.py",
        'vars(self._ddp)["require_forward_param_sync"] = False',
        "pass",
        RANKS_STATE + "test_buffers_are_not_broadcast_again_in_mid_window",
    ),
    Mutant(
        "a static graph's first micro-batch stays reduced",
        "wrappers/ddp.py",
        "self._own.keep_own()",
        "pass",
        RANKS_STATE + "test_a_static_graph_keeps_local_sums_in_its_very_first_micro_batch",
    ),
    Mutant(
        "sums that are elsewhere are thought to be in .grad",
        "_state.py",
        "if control.resuming is None:",
        "if False:",
        RANKS_STATE + "test_where_sums_are_not_in_grad_a_state_is_refused_in_mid_window",
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
        "begin(self._controls, reduce)",
        "begin(self._controls, True)",
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
        "_guards.py",
        "if not tally.position:\n        return\n",
        "if True:\n        return\n",
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
        "_guards.py",
        "if tally.broken:",
        "if False:",
        CASES + "test_case_27_an_exception_in_the_first_micro_batch_breaks_the_window_too",
    ),
    Mutant(
        "reset keeps the gradients",
        "_windows.py",
        "        self._gradients.drop()",
        "        pass",
        CASES + "test_case_27_an_exception_in_the_second_micro_batch",
    ),
    Mutant(
        "blocks may be nested",
        "_guards.py",
        "if thread is not None:\n        where",
        "if False:\n        where",
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
        "a backward of an earlier forward is taken for this one's",
        "wrappers/ddp.py",
        "self.backwards == 1 and not self.disturbed and",
        "self.backwards == 1 and",
        DDP + "test_case_13_each_block_runs_the_backward_of_the_forward_before",
    ),
    Mutant(
        "a drop is expected only by the wrapper that must run it",
        "_drop.py",
        "control.must_run_backward = True",
        "pass",
        "distributed/test_review.py::test_a_loss_of_two_models_whose_slope_is_not_finite_is_dropped_from_both",
    ),
    Mutant(
        "padding is the object that the body had",
        "_batches.py",
        "self._spare = _copied(batch)",
        "self._spare = batch",
        "distributed/test_batches.py::test_a_body_that_takes_its_batch_apart_finds_the_padding_whole[sized-as_dict]",
    ),
    Mutant(
        "a dropped batch that pads runs its backward",
        "_windows.py",
        "if not is_zero(weight):\n            return scaled",
        "if tally.padding or not is_zero(weight):\n            return scaled",
        "distributed/test_batches.py::test_padding_by_a_batch_that_was_dropped_contributes_nothing",
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
    # -- the scaler
    Mutant(
        "the factor is read for each loss",
        "_amp.py",
        "if tally.loss_scale is None:",
        "if True:",
        SCALER + "test_another_accumulators_update_in_mid_window_changes_nothing",
    ),
    Mutant(
        "a window does not follow the scaler",
        "_amp.py",
        "if held is not None and not is_present:",
        "if False:",
        SCALER + "test_another_accumulators_update_in_mid_window_changes_nothing",
    ),
    Mutant(
        "a factor is applied in float16",
        "_amp.py",
        "loss = loss.float()  # a",
        "pass  # a",
        SCALER + "test_a_float16_loss_is_scaled_in_float32",
    ),
    Mutant(
        "the first window takes a weight to be 1",
        "_amp.py",
        "FIRST_WEIGHT = 1024.0",
        "FIRST_WEIGHT = 1.0",
        SCALER + "test_weights_of_tokens_do_not_overflow_float16_in_any_window",
    ),
    Mutant(
        "a rank without micro-batches does not learn the factor",
        "_amp.py",
        "if factor is None and count.item():",
        "if False:",
        SCALED_RANKS + "test_a_rank_without_any_micro_batch_learns_the_factor_of_a_flushed_window",
    ),
    Mutant(
        "unscaling in mid-window passes",
        "_amp.py",
        "if (tally := self._windows.open) is not None:",
        "if (tally := self._windows.open) is not None and False:",
        SCALER + "test_unscaling_in_mid_window_is_an_error_that_harms_nothing",
    ),
    Mutant(
        "the norm holds the factor",
        "_amp.py",
        "yield norm / (",
        "yield norm + 0 * (",
        SCALER + "test_case_36_clipping_sees_the_unscaled_gradient_whoever_unscales",
    ),
    Mutant(
        "clipping takes unscaled gradients for scaled ones",
        "_amp.py",
        "self._unscaled.update(map(id, own))",
        "pass",
        SCALER + "test_case_36_clipping_sees_the_unscaled_gradient_whoever_unscales",
    ),
    Mutant(
        "ranks do not agree on what they have found",
        "_amp.py",
        "if self._ranks.groups:\n            _write",
        "if False:\n            _write",
        SCALED_RANKS + "test_what_is_infinite_in_one_shard_skips_every_rank",
    ),
    Mutant(
        "two infinite ranks make a 2",
        "_amp.py",
        "for flag in flags]).sum() > 0",
        "for flag in flags]).sum()",
        SCALED_RANKS + "test_what_is_infinite_in_one_shard_skips_every_rank",
    ),
    Mutant(
        "each optimizer is skipped for itself",
        "_amp.py",
        "for found in every:\n            _write(found, bad)",
        "for found in ():\n            _write(found, bad)",
        SCALER + "test_one_optimizers_infinite_gradient_skips_all_that_are_stepped_by_the_same_call",
    ),
    Mutant(
        "each call updates the scaler",
        "_amp.py",
        "if not self._waiting:",
        "if True:",
        SCALER + "test_case_37_one_update_also_if_each_optimizer_is_stepped_by_a_call_of_its_own",
    ),
    Mutant(
        "an update takes what others have found",
        "_grad_scaler.py",
        "if key not in optimizers}",
        "if False}",
        SCALER + "test_what_the_user_has_unscaled_is_not_unscaled_again_after_another_accumulators_update",
    ),
    Mutant(
        "schedulers do not notice a skipped update",
        "_update.py",
        "for scheduler in schedulers if stepped else ():",
        "for scheduler in schedulers:",
        SCALER + "test_case_37_an_infinite_gradient_in_the_second_micro_batch_skips_the_update",
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
        "            if control is None:\n                refuse_unknown(name, module)",
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
        "wrappers/_ddp_reducer.py",
        'self._attributes["require_backward_grad_sync"] = True',
        "pass",
        DDP + "test_case_48_an_exception_off_the_boundary_then_a_backward_without_the_library",
    ),
    Mutant(
        "Ctrl-C in forward leaves DDP's flag off",
        "wrappers/ddp.py",
        "self._blocks.pop()\n        self._switch.remove()",
        "self._blocks.pop()",
        FAULTS + "test_a_fault_in_a_micro_batch_of_every_rank[Ctrl-C-in forward-ddp]",
    ),
    Mutant(
        "closing leaves DDP's flag off after Ctrl-C",
        "wrappers/ddp.py",
        "            self._switch,\n",
        "",
        FAULTS + "test_ctrl_c_in_a_forward_outside_any_block_does_not_switch_ddp_off",
    ),
    Mutant(
        "an infinite weight spoils every later window",
        "_correction.py",
        "(total > 0) & total.isfinite()",
        "total > 0",
        FAULTS + "test_a_weight_that_is_not_finite_spoils_its_own_window_only[inf]",
    ),
    Mutant(
        "an update that raised counts as taken",
        "_update.py",
        "                optimizer.step()\n                done.append(optimizer)",
        "                self._taken.add((id(optimizer), update))\n                optimizer.step()",
        FAULTS + "test_an_optimizer_that_raises_without_wrapper[step again]",
    ),
    Mutant(
        "gradients stay after half an update",
        "_update.py",
        "for optimizer in done:\n                optimizer.zero_grad()",
        "for optimizer in done:\n                pass",
        FAULTS + "test_what_was_stepped_before_the_error_is_cleared_and_not_stepped_again",
    ),
    Mutant(
        "an unreduced bucket passes",
        "wrappers/_ddp_reducer.py",
        "    try:\n        ddp.reducer._check_reducer_finalized()\n    except RuntimeError as error:",
        "    try:\n        pass\n    except RuntimeError as error:",
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
        "setattr(group, name, value)",
        "setattr(group, name, value if name == _FLAGS[3] else True)",
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
    # -- check
    Mutant(
        "check: equal masks by chance",
        "checking/subject.py",
        "self.random.seed(seed)  # else",
        "pass  # else",
        CAUSE + "[dropout]",
    ),
    Mutant(
        "check: random numbers stay",
        "checking/verdict.py",
        "constants=True",
        "constants=False",
        CAUSE + "[dropout]",
    ),
    Mutant(
        "check: BatchNorm is not frozen",
        "checking/subject.py",
        "        if self.frozen:",
        "        if False:",
        CAUSE + "[BatchNorm and tokens]",
    ),
    Mutant(
        "check: eval mode freezes every BatchNorm",
        "checking/subject.py",
        "layer.training or layer.running_mean is None",
        "layer.training",
        CAUSE + "[BatchNorm without statistics]",
    ),
    Mutant(
        "check: copies share nothing but one",
        "checking/subject.py",
        "model = copy.deepcopy(self.model)",
        "model = self.model",
        CAUSE + "[divided by an earlier running mean]",
    ),
    Mutant(
        "check: gradients are not given back",
        "checking/prepare.py",
        "parameter.grad = grad",
        "pass",
        CHECK + "test_the_users_model_and_random_numbers_are_unharmed",
    ),
    Mutant(
        "check: buffers are not given back",
        "checking/prepare.py",
        "buffer.copy_(values)",
        "pass",
        CHECK + "test_the_users_model_and_random_numbers_are_unharmed",
    ),
    Mutant(
        "check: modes are not given back",
        "checking/prepare.py",
        "module.training = training",
        "pass",
        CHECK + "test_the_users_model_and_random_numbers_are_unharmed",
    ),
    Mutant(
        "check: random numbers are used up",
        "checking/randomness.py",
        "generator.set_state(state)",
        "pass",
        CHECK + "test_the_users_model_and_random_numbers_are_unharmed",
    ),
    Mutant(
        "check: the batch is the user's own",
        "checking/subject.py",
        "return tensor.detach().clone()",
        "return tensor.detach()",
        CHECK + "test_the_users_model_and_random_numbers_are_unharmed",
    ),
    Mutant(
        "check: models are compiled",
        "checking/prepare.py",
        'if "torch._dynamo" in sys.modules:',
        "if False:",
        CHECK + "test_a_compiled_model_is_checked_without_compiling_it",
    ),
    Mutant(
        "check: zeros are measured against zeros",
        "checking/measure.py",
        "max(float(reference.norm()), floor)",
        "float(reference.norm())",
        CHECK + "test_a_gradient_that_must_be_zero_is_measured_against_the_others",
    ),
    Mutant(
        "check: the ratio is no least-squares factor",
        "checking/measure.py",
        "/ size(expected) ** 2",
        "/ size(expected) / size(grads)",
        CHECK + "test_case_11_dividing_by_hand_as_well_is_reported_as_divided_twice",
    ),
    Mutant(
        "check: float32 inside is an error",
        "checking/measure.py",
        "worst <= 30 * self._noise",
        "False",
        CAUSE + "[float32 inside]",
    ),
    Mutant(
        "check: every difference is rounding",
        "checking/measure.py",
        "worst <= self.limit and",
        "worst <= 1e3 and",
        CAUSE + "[rows weighted by their place]",
    ),
    Mutant(
        "check: weights need not sum to 1",
        "checking/measure.py",
        "one = target.norm()",
        "one = target.norm() * 0",
        CAUSE + "[divided by the targets' maximum]",
    ),
    Mutant(
        "check: a factor is looked for among scalars of the big batch only",
        "checking/causes.py",
        "subject.forward(subject.parts()[0], noted)",
        "subject.forward(subject.batch, noted)",
        CAUSE + "[divided by rows, of which the whole has as many as steps]",
    ),
    Mutant(
        "check: the coefficient of a term is a factor of the whole",
        "checking/causes.py",
        "if rounding.same(scaled(without, factor), whole.grads):",
        "if without:",
        CAUSE + "[fine with a term of weight 1/4]",
    ),
    Mutant(
        "check: state is not looked for",
        "checking/causes.py",
        "if rounding.same(window, combined(fresh)):",
        "if True:",
        CAUSE + "[state that is no scale]",
    ),
    Mutant(
        "check: layers are not looked at",
        "checking/probes.py",
        "if float((together - layer.rows).norm()) >",
        "if 0 * float((together - layer.rows).norm()) >",
        CAUSE + "[a layer that mixes rows]",
    ),
    Mutant(
        "check: rows are the first dimension everywhere",
        "checking/probes.py",
        "!= (layer.name, layer.multiple) for",
        "!= (layer.name, other.multiple) for",
        CAUSE + "[rows in the second dimension]",
    ),
    Mutant(
        "check: few equations are enough",
        "checking/losses.py",
        "entries <= subject.steps + 1",
        "entries <= 0",
        CAUSE + "[contrastive with few parameters]",
    ),
    Mutant(
        "check: statistics stay in the loss",
        "checking/probes.py",
        "return kept if name in _DIVISIONS and isinstance(by, Tensor) and by.numel() == 1 else None",
        "return None",
        CAUSE + "[divided by the outputs' maximum]",
    ),
    Mutant(
        "check: terms are not told apart",
        "checking/probes.py",
        "if self.count - 1 == self._leave_out:",
        "if False:",
        CAUSE + "[terms over tokens and over rows]",
    ),
    Mutant(
        "check: a weight of 0 still adds NaN",
        "checking/measure.py",
        "in run.grads.items() if weight else ():",
        "in run.grads.items():",
        CAUSE + "[a micro-batch dropped and tokens]",
    ),
    Mutant(
        "check: low precision is not looked at",
        "checking/causes.py",
        "lost <= 2 * lost_once + 1e-3",
        "True",
        CHECK + "test_low_precision_is_what_only_accumulation_loses",
    ),
    Mutant(
        "check: the exit status is 0 in any case",
        "checking/command.py",
        "return 0 if report.ok else 1",
        "return 0",
        "unit/test_check_command.py::test_different_gradients_are_status_1_with_the_cause",
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
