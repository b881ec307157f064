"""Which cases a quick run keeps. Most of the time of a test goes to compiling, and most cases compile programs of their own.

A rule is a pattern of tests, by file and name, what is kept of each of them, and patterns of tests that it is not for. A
test follows all rules that fit, one after the other. What they leave out is marked `deep`, and a full run has it. Cases that
are marked already, and compiled kernels, which are for GPUs, are not counted.
"""

import collections
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


def first(count, per=None):
    """Keeps the first `count` cases, or those for each value of the parameter `per`, or all cases of a test without it."""

    def keep(cases):
        if per is not None and per not in cases[0].callspec.params:
            return cases
        seen, kept = collections.Counter(), []
        for case in cases:
            seen[group := case.callspec.params.get(per)] += 1
            if seen[group] <= count:
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
    # Kernels: an op is compiled for each case, and takes longer in interpret mode. Each op runs against its equation in all
    # implementations, and what else holds for all ops, like that no row depends on another one, is shown for some of them.
    ("kernels/*", first(1, per="implementation"), "kernels/test_random_calls.py::*"),
    ("kernels/*_config*", nothing, "kernels/test_lowering.py::*", "*_refused", "*_bad_*"),
    ("kernels/*_every_tile_size_*", nothing),
    ("kernels/*_differentiates", nothing),
    ("kernels/*_may_follow_a_verify_step", nothing),
    ("kernels/*_continues_one_recurrence", nothing),
    ("kernels/*_decodes_agree", nothing),
    ("kernels/*_of_nan_leaves_the_next_one_alone", nothing),
    ("kernels/*_without_tokens_folds", nothing),
    ("kernels/*_row_alone", nothing, "kernels/test_gated_delta_rule.py::*"),
    ("kernels/*_row_alone", only("xla")),
    ("kernels/*_each_other", nothing),
    ("kernels/*_on_other_tokens", nothing),
    ("kernels/*_on_other_rows", nothing),
    ("kernels/*_bit*", nothing, "kernels/test_*_prefill.py::*", "kernels/test_selective_state_deferred.py::*"),
    ("kernels/*_bit*", first(1)),
    ("kernels/test_*_layout.py::*_the_oracle", only("xla")),
    ("kernels/test_causal_conv1d.py::*_cuts_its_outputs", only("xla")),
    ("kernels/test_conv_boundary.py::*_without_tokens", nothing),
    ("kernels/test_convolved_chains.py::test_a_convolution_that_no_launch_*", nothing),
    ("kernels/test_experts_of_one_token.py::*", only("xla"), "*_in_one_share"),
    ("kernels/test_gated_delta_rule.py::*_the_oracle", only("xla"), "*::test_update_matches_the_oracle"),
    ("kernels/test_gated_delta_rule.py::test_update_with_a_window_of_one_*", nothing),
    ("kernels/test_selective_state_deferred.py::test_a_program_for_single_tokens_*", nothing),
    ("kernels/*_other_chunk_sizes_*", nothing),
    ("kernels/*_optional_arguments_*", nothing),
    ("kernels/*_extreme_decays_*", nothing),
    ("kernels/*_rows_of_every_length*", nothing),
    ("kernels/*_short_rows_*", nothing),
    ("kernels/*_of_rows_of_1_to_64_tokens", nothing),
    ("kernels/*_as_xla", nothing),
    ("kernels/test_mixture_of_experts.py::test_kernels_cut_the_tiles_*", nothing),
    ("kernels/test_choose_experts.py::*", only("xla"), "*_is_the_equation"),
    ("kernels/test_gated_delta_rule_prefill.py::*", only("xla"), "*::test_prefill_matches_the_oracle"),
    ("kernels/test_least_kept.py::*", nothing, "*_follows_the_definitions", "*_argument"),
    ("kernels/test_mixture_of_experts.py::*", only("xla"), "*_is_the_equation"),
    ("kernels/test_mixture_of_experts.py::*_rounded_once_*", nothing),
    ("kernels/test_paged_attention.py::*", only("xla"), "*_is_the_equation"),
    ("kernels/test_rotary.py::*", only("xla"), "*_rotated_and_stored"),
    ("kernels/test_selective_scan.py::*", only("xla"), "*::test_scan_matches_the_oracle"),
    ("kernels/test_selective_scan.py::*_by_default", nothing),
    ("kernels/test_ssd.py::*", only("xla"), "*::test_ssd_matches_the_oracle"),
    # GPUs run the same ops in other ways. One of each kind is lowered, or its steps are run in NumPy.
    ("kernels/test_lowering.py::test_every_case_lowers_for_h200", first(1, per="op")),
    ("kernels/test_lowering.py::test_every_configuration_lowers", first(1)),
    ("kernels/test_lowering.py::test_every_variant_of_deferred_states_lowers", nothing),
    ("kernels/test_lowering.py::test_one_case_of_each_op_lowers_for_other_gpus", first(1, per="device")),
    ("kernels/test_lowering.py::test_pools_of_more_than_2_to_the_31_elements_*", first(1)),
    ("kernels/test_lowering.py::test_the_default_is_triton_on_cuda", first(1)),
    ("kernels/test_little_shared_memory.py::test_cases_lower_or_are_refused", nothing),
    ("kernels/test_little_shared_memory.py::test_smaller_tiles_attend_rightly", nothing),
    ("kernels/test_several_tokens_in_numpy.py::test_all_programs_*", nothing),
    ("kernels/test_chunk_intra_in_numpy.py::*", nothing),
    ("kernels/test_state_warps_in_numpy.py::*", first(3)),
    ("kernels/*_in_every_phase_*", only("xla", "interpret")),
    ("kernels/test_several_tokens_in_numpy.py::test_a_large_residual_stream_*", nothing),
    ("kernels/test_convolved_chains.py::test_all_programs_*", nothing),
    ("kernels/test_chains_over_devices.py::test_all_programs_*", nothing),
    ("kernels/test_all_reduce.py::test_devices_that_take_turns_*", nothing),
    ("kernels/test_product_chain.py::test_ctas_divide_the_work_without_gaps", first(1, per="ctas")),
    ("kernels/test_product_chain.py::test_the_schedule_computes_a_chain", first(3)),
    ("kernels/test_check.py::test_layer_out_of_range_is_refused", once),
    ("kernels/test_check.py::test_numpy_arrays_give_*", first(3)),
    ("kernels/test_chunks.py::test_device_and_host_*", nothing),
    ("kernels/test_linear.py::test_total_of_the_sums_is_the_product", first(1)),
    ("kernels/test_linear.py::test_narrower_inputs_*", first(1)),
    # Models: a family is compiled for each case. Each family has a case of one test.
    ("models/test_generation.py::*", nothing),
    ("models/test_reference.py::test_logits_*", only("bamba", "lfm2_moe", "mamba", "mamba2")),
    ("models/test_reference.py::test_every_split_*", nothing),
    ("models/test_*.py::test_bfloat16_logits_are_close", nothing),
    ("models/test_delta_nets.py::test_logits_*", only("olmo_hybrid", "qwen3_5_moe", "qwen3_next")),
    ("models/test_mamba_models.py::test_prompt_*_matches_the_oracle", once),
    ("models/test_mamba_models.py::test_prompt_of_several_chunks_*", first(1)),
    ("models/test_mamba_models.py::test_every_split_*", nothing),
    ("models/test_mamba_models.py::test_decode_*", only("falcon_mamba")),
    ("models/test_mamba_models.py::test_request_resumes_*", nothing),
    ("models/test_mamba_layers.py::test_mixer_matches_the_oracle", nothing),
    ("models/test_chained_decoding.py::*", nothing),
    ("models/test_moe.py::*", first(1)),
    ("models/test_moe.py::test_padding_tokens_*", nothing),
    ("models/test_mtp.py::test_*", first(1, per="cuts")),
    ("models/test_mtp.py::test_guesses_without_a_page_*", only("qwen3_next")),
    ("models/test_mtp.py::test_outputs_*", nothing),
    ("models/test_mtp.py::test_drafts_of_mixed_rows_*", nothing),
    ("models/test_quantised.py::test_fp8_weights_load_as_what_they_mean", once),
    ("models/test_quantised.py::test_fp8_weights_load_as_what_they_mean", first(4)),
    ("models/test_bad_files.py::test_tensors_whose_shapes_*", first(2)),
    ("models/test_bad_files.py::test_weights_that_are_not_finite_*", first(1)),
    ("models/test_end_tokens.py::test_generation_stops_*", nothing),
    ("models/test_published_layouts.py::test_text_part_of_nemotron_*", first(2)),
    ("models/test_train_byte_model.py::test_forward_pass_*", nothing),
    ("models/test_variants.py::test_*", first(1)),
    # Layers: as for kernels and models.
    ("layers/test_chain.py::*", first(1)),
    ("layers/test_layouts.py::test_engines_of_one_model_*", nothing),
    ("layers/test_mixers.py::test_attention_without_pages_*", nothing),
    ("layers/test_kimi_layers.py::*_matches_the_oracle", nothing),
    ("layers/test_attention.py::test_attention_over_pages_*", first(1)),
    ("layers/test_attention.py::test_project_*", first(2)),
    ("layers/test_rotation.py::test_stretched_rotation_*", nothing),
    # The engine: each way of stepping compiles programs of its own.
    ("engine/test_adjust.py::*", only("async_drafts")),
    ("engine/test_adjust.py::test_drawn_tokens_*", nothing),
    ("engine/test_adjust.py::test_greedy_tokens_*", nothing),
    ("engine/test_adjust.py::test_lower_levels_*", nothing),
    ("engine/test_adjust.py::test_tokens_are_the_same_after_an_interrupt", nothing),
    ("engine/test_adjust.py::test_failure_to_make_the_state_*", nothing),
    ("engine/test_admission.py::test_prompts_of_every_kind_*", nothing),
    ("engine/test_async_engine.py::*", only("async")),
    ("engine/test_async_engine.py::test_full_queue_*", nothing),
    ("engine/test_block_size_warning.py::test_the_longest_prompt_*", nothing),
    ("engine/test_buckets.py::test_engine_whose_requests_draw_nothing_*", nothing),
    ("engine/test_cached_prefix.py::test_mode_none_*", nothing),
    ("engine/test_command_thread.py::test_a_process_that_ends_*", first(1)),
    ("engine/test_deferred.py::*", once),
    ("engine/test_deferred.py::test_requests_with_drafts_*", nothing),
    ("engine/test_deferred.py::test_a_prompt_resumed_*", nothing),
    ("engine/test_deferred.py::test_a_request_leaves_*", only("sync")),
    ("engine/test_deferred.py::test_a_request_leaves_*", first(1)),
    ("engine/test_deferred.py::test_no_byte_of_a_state_*", nothing),
    ("engine/test_deferred.py::test_a_running_request_holds_*", nothing),
    ("engine/test_deferred.py::test_a_boundary_is_published_*", nothing),
    ("engine/test_deferred.py::test_a_prefix_moves_*", nothing),
    ("engine/test_engine.py::test_greedy_tokens_equal_those_of_transformers", nothing),
    ("engine/test_engine.py::test_chunks_that_end_inside_*", nothing),
    ("engine/test_engine.py::test_evicted_prefixes_*", nothing),
    ("engine/test_engine.py::test_lost_states_*", nothing),
    ("engine/test_engine.py::test_preempted_*", nothing),
    ("engine/test_engine.py::test_requests_may_arrive_*", first(1)),
    ("engine/test_engine.py::test_step_that_raises_*", first(1)),
    ("engine/test_engine.py::test_shared_prefixes_*", only("copy_free")),
    ("engine/test_engine.py::test_programs_have_no_conditional", nothing),
    ("engine/test_engine.py::test_no_program_is_compiled_after_warmup", nothing),
    ("engine/test_generate.py::test_each_prompt_has_*", nothing),
    ("engine/test_grammar.py::*", only("async_drafts")),
    ("engine/test_grammar.py::test_greedy_tokens_*", nothing),
    ("engine/test_grammar.py::test_constrained_request_runs_*", nothing),
    ("engine/test_grammar.py::test_masks_allow_*", first(1)),
    ("engine/test_launching_ahead.py::test_a_request_may_hold_one_block_more", nothing),
    ("engine/test_launching_ahead.py::test_a_fold_that_fails_*", nothing),
    ("engine/test_launching_ahead.py::test_a_prefix_that_is_imported_*", nothing),
    ("engine/test_launching_ahead.py::test_nothing_leaves_*", nothing),
    ("engine/test_launching_ahead.py::*", first(1)),
    ("engine/test_logprobs.py::*", only("async_drafts")),
    ("engine/test_logprobs.py::test_log_probabilities_*", nothing),
    ("engine/test_logprobs.py::test_prompts_are_scored_*", first(1)),
    ("engine/test_logprobs.py::test_updates_have_each_*", nothing),
    ("engine/test_logprobs.py::test_neighbours_do_not_pay", nothing),
    ("engine/test_masks.py::test_a_request_over_its_budget_*", only("plain", "async")),
    ("engine/test_mode_all.py::*", first(1)),
    ("engine/test_mode_all.py::test_chunk_is_shorter_*", nothing),
    ("engine/test_mode_all.py::test_evicted_states_*", nothing),
    ("engine/test_packing.py::test_inputs_in_use_*", nothing),
    ("engine/test_packing.py::test_steps_that_differ_*", nothing),
    ("engine/test_packing.py::test_tokens_that_the_host_knows_*", nothing),
    ("engine/test_page_tables.py::test_a_long_hit_*", nothing),
    ("engine/test_page_tables.py::test_what_a_step_computes_*", nothing),
    ("engine/test_pending.py::test_histories_hold_*", nothing),
    ("engine/test_sampling.py::test_a_seeds_tokens_*", nothing),
    ("engine/test_sampling.py::test_every_token_has_*", first(1)),
    ("engine/test_sizing.py::test_large_sizes_*", nothing),
    ("engine/test_soak.py::test_any_workload_*", only("pre_copy, asynchronous")),
    ("engine/test_soak.py::test_any_workload_*", first(1)),
    ("engine/test_soak.py::test_soak_finds_bug", nothing),
    ("engine/test_soak.py::test_small_soak", nothing),
    ("engine/test_speculation.py::test_accepted_drafts_save_steps_*", nothing),
    ("engine/test_speculation.py::test_any_acceptance_is_right_with_drafts_of_the_device", nothing),
    ("engine/test_speculation.py::test_boundaries_passed_*", nothing),
    ("engine/test_speculation.py::test_late_result_*", nothing),
    ("engine/test_speculation.py::test_prompt_lookup_on_the_device_*", nothing),
    ("engine/test_speculation.py::test_request_chooses_its_number_of_drafts", nothing),
    ("engine/test_speculation.py::test_trace_agrees_*", nothing),
    ("engine/test_speculation.py::test_trace_of_late_results_*", nothing),
    ("engine/test_stats.py::test_a_request_*", nothing),
    ("engine/test_stats.py::test_counts_survive_*", nothing),
    ("engine/test_stop.py::*", only("async"), "*_completes_a_stop_string"),
    ("engine/test_stop.py::*_completes_a_stop_string", only("drafts")),
    # The server takes and returns text.
    ("engine/test_text.py::test_engine_takes_and_returns_text", nothing),
    ("engine/test_text.py::test_command_line_uses_the_tokenizer", nothing),
    ("engine/test_threads.py::*", only("async")),
    ("engine/test_transfer.py::test_prefixes_move_between_layouts", nothing),
    ("engine/test_transfer.py::test_an_interrupt_at_any_line_*", nothing),
    ("engine/test_transfer.py::test_an_imported_prefix_*", only("async")),
    ("engine/test_transfer.py::test_a_saved_prefix_whose_pages_*", nothing),
    ("engine/test_transfer.py::test_other_weights_and_other_fields_*", nothing),
    ("engine/test_transfer.py::test_what_is_published_but_not_read_*", nothing),
    ("engine/test_transfer.py::test_an_import_evicts_*", nothing),
    ("engine/test_transfer.py::test_any_thread_*", nothing),
    ("engine/test_updates.py::*", only("async")),
    ("engine/test_updates.py::test_log_probabilities_*", nothing),
    ("failures/test_engine.py::*", only("async")),
    ("failures/test_engine.py::test_warming_up_*", nothing),
    ("failures/test_engine.py::test_prompts_of_every_length_*", nothing),
    ("failures/test_panics.py::test_a_real_panic_*", nothing),
    ("failures/test_events.py::*_any_line_*", nothing),
    ("failures/test_events.py::test_every_line_*", nothing),
    ("failures/test_events.py::test_a_mirror_has_the_keys_*", nothing),
    ("failures/test_interrupts.py::*", nothing, "*::test_interrupt_at_any_line_*"),
    ("failures/test_interrupts.py::test_interrupt_at_any_line_*", only("async")),
    ("failures/test_kernels.py::*", only("xla")),
    ("failures/test_kernels.py::test_prompts_of_more_than_*", nothing),
    ("failures/test_owners.py::test_failing_call_*", only("async")),
    ("failures/test_owners.py::test_failing_call_*", once),
    ("failures/test_owners.py::test_failing_call_*", first(3)),
    ("failures/test_owners.py::test_cache_survives_*", nothing),
    ("failures/test_owners.py::test_wrong_drafts_*", first(3)),
    ("failures/test_bookkeeping.py::*", first(1)),
    # The server, whose modules share an engine.
    ("serve/test_bombs.py::test_a_template_bomb_*", nothing),
    ("serve/test_clients.py::test_a_vanished_client_*", first(1)),
    ("serve/test_command.py::test_a_cache_is_restored_*", nothing),
    ("serve/test_command.py::test_a_signal_lets_streams_finish_*", nothing),
    ("serve/test_chat.py::test_special_tokens_*", nothing),
    ("serve/test_clients.py::test_a_stream_in_which_the_server_fails_*", nothing),
    ("serve/test_clients.py::test_a_call_that_the_queue_could_never_hold_*", nothing),
    ("serve/test_delays.py::test_a_client_that_reads_*", first(1)),
    ("serve/test_load.py::*", nothing),
    ("serve/test_metrics.py::test_the_miss_of_a_request_*", nothing),
    ("serve/test_page.py::test_the_page_is_light_or_dark_*", nothing),
    ("serve/test_sampling.py::test_an_answer_follows_its_schema", nothing),
    ("serve/test_sampling.py::test_each_token_of_whole_characters_*", first(1)),
    ("serve/test_server_benchmark.py::*", nothing),
    # Steps without a model: each case compiles its step.
    ("align/test_donation.py::test_*_of_another_layout", nothing),
    ("align/test_donation.py::*", first(1)),
    ("align/test_donation.py::test_a_donated_step_of_deferred_states_*", nothing),
    ("align/test_deferred.py::*", first(1), "*_are_refused"),
    ("align/test_boundary_windows.py::*", first(1)),
    ("align/test_checked.py::test_correct_steps_*", first(4)),
    ("align/test_slots.py::test_each_row_sets_its_slot", nothing),
    ("align/*_stays_int32_in_64_bit_mode", nothing),
    ("align/test_step.py::*", once),
    ("align/test_worked_examples.py::test_example", once),
    # Several devices and processes.
    ("sharding/test_exchange.py::*", only("mamba2")),
    ("sharding/test_chains_over_devices.py::*", nothing),
    ("sharding/test_commands.py::*", only("async")),
    ("sharding/test_commands.py::test_follower_*_the_leader*", nothing, "*_has_ended"),
    ("sharding/test_commands.py::test_lost_pools_*", nothing),
    ("sharding/test_sharding.py::test_on_several_devices", only("four_devices.py")),
    ("sharding/test_processes.py::test_process_with_other_weights_is_refused", nothing),
    ("sharding/four_devices.py::test_engine_on_four_devices_*", nothing),
    ("sharding/four_devices.py::test_deferred_states_*", nothing),
    ("sharding/four_devices.py::test_prefixes_move_*", nothing),
    ("sharding/four_devices.py::test_prompt_lookup_*", nothing),
    ("sharding/four_devices.py::test_changed_logits_*", nothing),
    ("sharding/four_devices.py::test_digest_of_weights_*", nothing),
    ("sharding/four_devices.py::test_shared_blocks_*", nothing),
    ("sharding/four_devices.py::test_arrays_without_elements_*", nothing),
    ("sharding/four_devices.py::test_every_kind_of_layer_*", nothing),
    ("sharding/four_devices.py::test_draft_head_*", nothing),
    ("sharding/four_devices.py::test_ops_run_in_another_shard_map", nothing),
    ("sharding/four_devices.py::test_rings_of_another_step_*", nothing),
    ("sharding/four_devices.py::test_states_of_one_head_*", nothing),
    ("sharding/four_devices.py::test_even_split_of_a_window_*", nothing),
    ("gpu/test_gpu_commands.py::test_a_stopped_run_*", nothing),
    # Benchmarks, examples and other people's stacks.
    ("benchmarks/test_kernels.py::test_every_kind_of_benchmark_*", first(1)),
    ("benchmarks/test_kernels.py::test_prefill_agrees_*", nothing),
    ("benchmarks/test_candidates.py::*", nothing, "*::test_sums_over_devices_*", "*_counts_the_chosen_experts"),
    ("benchmarks/test_transfer.py::*", nothing),
    ("benchmarks/test_memory.py::*", nothing),
    ("benchmarks/test_model_floor.py::test_the_floor_of_experts_*", nothing),
    ("benchmarks/test_pipeline.py::*_deferred_states_compute_*", nothing),
    ("benchmarks/test_peers.py::test_the_fastest_peer_*", nothing),
    ("benchmarks/test_host.py::*", nothing),
    ("benchmarks/test_precision.py::test_precision_measures_*", nothing),
    ("benchmarks/test_pipeline.py::*_both_policies_compute_*", nothing),
    ("benchmarks/test_pipeline.py::*_rows_of_deferred_states_*", nothing),
    ("benchmarks/test_pipeline.py::*", first(1)),
    ("benchmarks/*.py::*", once),
    ("integrations/test_lowering.py::*", first(2)),
    ("integrations/test_delta_rule_verify.py::*", first(1)),
    ("integrations/test_sglang_jax.py::*", first(1)),
    ("integrations/test_sglang_jax.py::test_a_prompt_that_is_cut_*", nothing),
    ("integrations/test_tpu_inference.py::*", first(1)),
    ("integrations/test_tpu_inference.py::test_a_prompt_that_resumes_*", nothing),
    ("integrations/test_tpu_inference.py::test_a_block_of_ours_*", nothing),
    ("integrations/*::test_a_donated_step_copies_no_pool", nothing),
    ("integrations/*::test_rows_without_drafts_*", nothing),
    ("test_cli.py::test_bench_times_each_mode_*", nothing),
    ("test_readme.py::test_a_batch_of_both_kinds_*", nothing),
    ("test_readme.py::test_a_hybrid_model_in_a_foreign_step_*", nothing),
    ("test_readme.py::test_the_hybrid_example_*", nothing),
    ("test_jax_settings.py::*", nothing),
    ("test_chat.py::test_answers_end_where_*", nothing),
    ("test_chat.py::test_stream_yields_*", nothing),
    ("test_cli.py::test_a_reader_that_has_seen_enough_*", nothing),
    ("test_depth.py::test_deep_tests_that_come_too_late_*", nothing),
    ("test_serving.py::test_the_commands_of_the_repository_*", first(1)),
    ("test_serving.py::test_a_mode_that_only_some_models_*", nothing),
)


def is_skipped(item):
    """Returns whether a test's marker `skipif` skips it on this machine."""
    return any(marker.args[0] for marker in item.iter_markers("skipif"))


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
        # Most patterns begin with another file, which is seen at less cost.
        fits = lambda pattern, test=test: (
            test.startswith(pattern.partition("*")[0]) and fnmatch.fnmatchcase(test, pattern)
        )
        for pattern, keep, *others in rules:
            if kept and fits(pattern) and not any(map(fits, others)):
                kept = keep(kept) if keep is nothing or hasattr(kept[0], "callspec") else kept
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
    """The strings among the parameters of a case, and the names of functions."""
    values = case.callspec.params.values()
    return {value if isinstance(value, str) else getattr(value, "__name__", None) for value in values}
