"""Which cases a quick run keeps. Most of the time of a test goes to compiling, and most cases compile programs of their own.

A rule is a pattern of tests, by file and name, and what is kept of each of them. A test follows all rules that fit, one
after the other. What they leave out is marked `deep`, and a full run has it. Cases that are marked already, and compiled
kernels, which are for GPUs, are not counted.
"""

import fnmatch
import itertools
import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What a run has left out, for the tests of these rules.
LEFT_OUT = pytest.StashKey()


def once(cases):
    """Keeps cases in which every value of every parameter occurs."""
    return _with_all(cases, 1)


def pairs(cases):
    """Keeps cases in which every two values of different parameters occur together that do so in any case."""
    return _with_all(cases, 2)


def first(count, per=None, of=None):
    """Keeps the first `count` cases for each value of the parameter `per`. With `of`, cases without this value stay too."""

    def keep(cases):
        seen, kept = {}, []
        for case in cases:
            if of is None or of in _values(case):
                group = case.callspec.params.get(per)
                seen[group] = seen.get(group, 0) + 1
                if seen[group] > count:
                    continue
            kept.append(case)
        return kept

    return keep


def only(*values):
    """Keeps cases that have one of `values`, or all cases if none has."""
    return lambda cases: [case for case in cases if not _values(case).isdisjoint(values)] or cases


def nothing(cases):
    """Leaves the whole test to a full run."""
    return []


RULES = (
    # Kernels: an op is compiled for each case, and takes longer in interpret mode.
    ("kernels/*", first(1, of="interpret")),
    ("kernels/test_*_deferred.py::test_rows_*_match_the_oracle", first(1, per="implementation")),
    ("kernels/test_gated_delta_rule.py::test_update_with_a_window_of_one_*", first(1)),
    ("kernels/test_lowering.py::test_every_variant_of_deferred_states_lowers", first(1)),
    ("kernels/test_lowering.py::test_every_configuration_lowers", first(1, per="op")),
    ("kernels/test_lowering.py::test_every_case_lowers_for_h200", first(1, per="op")),
    ("kernels/test_lowering.py::test_one_case_of_each_op_lowers_for_other_gpus", once),
    ("kernels/test_check.py::test_layer_out_of_range_is_refused", once),
    ("kernels/*_the_oracle", once),
    ("kernels/*_bit*", once),
    ("kernels/*_is_the_equation", once),
    ("kernels/*_nothing_else_changes", once),
    ("kernels/*_normed_rotated_and_stored", once),
    ("kernels/*_chooses_inside_the_first_product", once),
    ("kernels/*_of_whole_blocks_are_exact", once),
    ("kernels/*_of_windows_are_exact", once),
    ("kernels/test_product_chain.py::test_separate_launches_match_the_oracle", once),
    ("kernels/test_product_chain.py::test_separate_launches_match_the_oracle", first(9)),
    ("kernels/test_product_chain.py::test_the_schedule_computes_a_chain", once),
    ("kernels/test_gated_delta_rule_prefill.py::test_prefill_of_rows_of_1_to_64_tokens", first(1)),
    ("kernels/test_gated_delta_rule_prefill.py::test_prefill_split_on_the_grid_*", first(2)),
    ("kernels/test_linear.py::test_total_of_the_sums_is_the_product", first(7)),
    ("kernels/test_several_tokens_in_numpy.py::test_all_programs_*", first(3)),
    # Models: a family is compiled for each case. Each family has a case of one test.
    ("models/test_generation.py::test_engine_generates_the_reference_tokens", only("lfm2", "mamba", "qwen3_5_text")),
    ("models/test_generation.py::test_*_from_deferred_states", only("mamba2")),
    ("models/test_generation.py::test_*_from_pools_of_another_layout", nothing),
    ("models/test_reference.py::test_logits_*", only("bamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "qwen3_5_text")),
    ("models/test_reference.py::test_every_split_*", only("qwen3_5_text")),
    ("models/test_*.py::test_bfloat16_logits_are_close", nothing),
    ("models/test_delta_nets.py::test_logits_*", only("olmo_hybrid", "qwen3_5_moe", "qwen3_next")),
    ("models/test_mamba_models.py::test_prompt_*_matches_the_oracle", once),
    ("models/test_mamba_models.py::test_prompt_of_several_chunks_*", first(1)),
    ("models/test_mamba_models.py::test_every_split_*", only("falcon_mamba")),
    ("models/test_mamba_models.py::test_decode_*", only("falcon_mamba", "falcon_h1")),
    ("models/test_mamba_models.py::test_request_resumes_*", only("falcon_mamba", "zamba2")),
    ("models/test_mtp.py::test_outputs_*", once),
    ("models/test_mtp.py::test_*", first(1, per="cuts")),
    ("models/test_chained_decoding.py::*", once),
    ("models/test_quantised.py::test_fp8_weights_load_as_what_they_mean", once),
    ("models/test_variants.py::test_bamba_rotates_*", first(2)),
    ("layers/test_chain.py::test_a_model_computes_the_same_with_chains", once),
    ("layers/test_chain.py::*", pairs),
    ("layers/test_rotation.py::test_stretched_rotation_*", only("longrope", "yarn")),
    ("layers/test_rotation.py::test_stretched_rotation_*", once),
    # The engine: each way of stepping compiles programs of its own.
    ("engine/test_adjust.py::*", only("async_drafts")),
    ("engine/test_grammar.py::*", only("async_drafts")),
    ("engine/test_logprobs.py::*", only("async_drafts")),
    ("engine/test_engine.py::test_greedy_tokens_equal_those_of_transformers", only("async")),
    ("engine/test_engine.py::test_shared_prefixes_*", only("copy_free")),
    ("engine/test_engine.py::test_programs_have_no_conditional", nothing),
    ("engine/test_engine.py::test_no_program_is_compiled_after_warmup", nothing),
    ("engine/test_async_engine.py::*", only("async")),
    ("engine/test_threads.py::*", only("async")),
    ("engine/test_updates.py::*", only("async")),
    ("engine/test_stop.py::*", only("drafts", "async")),
    ("engine/test_soak.py::test_any_workload_*", once),
    ("engine/test_soak.py::test_soak_finds_bug", first(2)),
    ("engine/test_soak.py::test_small_soak", nothing),
    ("engine/test_deferred.py::test_requests_with_drafts_*", first(1)),
    ("engine/test_deferred.py::test_a_prompt_resumed_*", only("mamba2")),
    ("engine/test_deferred.py::test_a_request_leaves_*", only("sync")),
    ("engine/test_deferred.py::test_a_running_request_holds_*", only("sync")),
    ("engine/test_deferred.py::*", once),
    ("engine/test_adjust.py::test_drawn_tokens_*", nothing),
    ("engine/test_buckets.py::test_engine_whose_requests_draw_nothing_*", nothing),
    ("engine/test_grammar.py::test_greedy_tokens_*", nothing),
    ("engine/test_launching_ahead.py::test_a_request_may_hold_one_block_more", nothing),
    ("engine/test_launching_ahead.py::test_a_fold_that_fails_*", nothing),
    ("engine/test_logprobs.py::test_updates_have_each_*", nothing),
    ("engine/test_logprobs.py::test_neighbours_do_not_pay", nothing),
    ("engine/test_mode_all.py::*", first(1)),
    ("engine/test_packing.py::test_steps_that_differ_*", first(1)),
    ("engine/test_pending.py::test_histories_hold_*", nothing),
    ("engine/test_speculation.py::test_any_acceptance_is_right_with_drafts_of_the_device", nothing),
    ("engine/test_transfer.py::test_prefixes_move_between_layouts", nothing),
    ("engine/test_transfer.py::test_an_interrupt_at_any_line_of_a_new_file_*", nothing),
    ("engine/test_updates.py::test_log_probabilities_*", nothing),
    ("engine/test_transfer.py::test_an_imported_prefix_*", only("async", "all")),
    ("engine/test_transfer.py::test_an_interrupt_at_any_line_loses_nothing", only("import")),
    ("failures/test_engine.py::test_warming_up_*", nothing),
    ("failures/test_engine.py::*", only("async")),
    ("failures/test_events.py::test_a_mirror_has_the_keys_*", only("sync")),
    ("failures/test_owners.py::test_failing_call_*", once),
    ("failures/test_events.py::test_an_interrupt_at_any_line_*", only("async")),
    ("failures/test_interrupts.py::test_interrupt_at_any_line_*", only("async", "deferred")),
    ("serve/test_sampling.py::test_each_token_of_whole_characters_*", once),
    # Steps without a model: each case compiles its step.
    ("align/test_donation.py::test_*_of_another_layout", nothing),
    ("align/test_donation.py::*", once),
    ("align/test_deferred.py::test_a_chunk_after_verify_rows_*", once),
    ("align/test_deferred.py::test_boundaries_and_outputs_*", once),
    ("align/test_boundary_windows.py::test_a_boundary_has_its_window_*", once),
    ("align/test_boundary_windows.py::test_only_deferred_steps_*", once),
    ("align/test_checked.py::test_correct_steps_*", once),
    ("align/test_step.py::*", pairs),
    ("align/test_worked_examples.py::test_example", once),
    # Several devices and processes.
    ("sharding/test_exchange.py::*", only("kimi_linear", "lfm2_moe", "mamba2", "qwen3_next")),
    ("sharding/test_commands.py::*", only("async")),
    ("sharding/test_sharding.py::test_on_several_devices", only("four_devices.py")),
    ("sharding/test_processes.py::test_process_with_other_weights_is_refused", nothing),
    ("sharding/four_devices.py::test_deferred_states_*", nothing),
    ("sharding/four_devices.py::test_prefixes_move_*", nothing),
    ("sharding/four_devices.py::test_changed_logits_*", nothing),
    ("sharding/four_devices.py::test_digest_of_weights_*", nothing),
    ("sharding/four_devices.py::test_shared_blocks_*", nothing),
    ("sharding/four_devices.py::test_arrays_without_elements_*", nothing),
    # Benchmarks and examples.
    ("benchmarks/test_kernels.py::test_every_kind_of_benchmark_*", first(1, per="op")),
    ("benchmarks/test_kernels.py::test_prefill_agrees_*", first(1, per="op")),
    ("benchmarks/test_candidates.py::*", first(1)),
    ("benchmarks/test_transfer.py::*", first(1)),
    ("benchmarks/*.py::*", once),
    ("test_cli.py::test_bench_times_each_mode_*", nothing),
    ("test_readme.py::test_a_batch_of_both_kinds_*", first(1)),
)


def mark(items):
    """Marks what a quick run leaves out."""
    leave_out([item for item in items if not any(map(item.get_closest_marker, ("gpu", "deep")))], RULES)


def leave_out(items, rules):
    """Marks the cases that `rules` leave out as deep."""
    tests = {}
    for item in items:
        tests.setdefault((item.path, item.originalname or item.name), []).append(item)
    for (path, name), cases in tests.items():
        test = f"{os.path.relpath(path, TESTS)}::{name}"
        # Plugins may have changed the order of the items.
        kept = sorted(
            cases, key=lambda item: tuple(item.callspec.indices.values()) if hasattr(item, "callspec") else ()
        )
        for pattern, keep in rules:
            if kept and fnmatch.fnmatchcase(test, pattern) and (keep is nothing or hasattr(kept[0], "callspec")):
                kept = keep(kept)
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.deep)


def _with_all(cases, size):
    """Chooses cases, the next one being that which has most of the missing values, or tuples of `size` values."""
    size = min(size, len(cases[0].callspec.params))
    # Values may have no hash, but cases share them. `callspec.indices` would not do: pytest numbers the cases in it.
    values = lambda case: [(name, id(value)) for name, value in case.callspec.params.items()]
    found = {case: set(itertools.combinations(values(case), size)) for case in cases}
    missing, kept = set().union(*found.values()), []
    while missing:
        best = max(cases, key=lambda case: len(found[case] & missing))
        missing -= found[best]
        kept.append(best)
    return kept


def _values(case):
    return {value for value in case.callspec.params.values() if isinstance(value, str)}
