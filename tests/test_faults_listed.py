"""Faults seen in other trainers, and where each is held.

An id stands for one fault with an exact input and the right outcome. Either tests fail when the
fault is put in, or it cannot occur here, for the reason that is given.
"""

# ruff: noqa: E501  names of tests stay in one piece, to be found by search

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

IDS = """
GAE-01 GAE-03 GAE-04 GAE-05 GAE-08 GAE-09 GAE-11 GAE-12 GAE-13 GAE-16
LP-01 LP-02 LP-04 LP-06 LP-07 LP-08 LP-09 LP-10
KL-01 KL-02 KL-04 KL-06
PL-03 VL-01 VL-02 PL-05 PL-06
AG-02 AG-04 AG-05 AG-07 AG-08 AG-10
TK-01 TK-02 TK-03 TK-07 TK-08 TK-09 TK-11 TK-12
PK-01 PK-02 PK-03
MM-01 MM-03 MM-04 MM-05 MM-06 MM-10 MM-11
HF-02 HF-05 HF-06 HF-07 HF-09
RS-01 RS-02 RS-04 RS-06 RS-07 RS-10
CK-02 CK-05 CK-06
NF-01 NF-02 NF-04
DS-04 DS-06 DS-07 DS-08
RW-01 RW-03 RW-04 RW-06 RW-07
RC-01 RC-04 RC-05 RC-07 RC-08 RC-09 RC-10 RC-12
WS-01 WS-03 WS-04 WS-05 WS-06 WS-08
ME-01 ME-02 ME-05
ML-01 ML-02 ML-03 ML-04 ML-05
CF-02 CF-04 CF-05
RP-02
""".split()

CANNOT_OCCUR = {
    "PK-03": "no function takes a padding mask beside the segment ids: padding is segment 0, so "
    "there is nothing that could switch the segments off",
    "MM-05": "Gemma's norm and embedding scale are not built, and its configs are refused by name "
    "(tests/models/test_model_config.py::test_refusals_name_the_entry)",
}

HELD = {
    # advantages
    "GAE-01": """
        tests/test_advantages.py::test_gae_01_tool_output_is_not_a_step
        tests/test_steps.py::test_gae_of_the_packed_batch_equals_each_trajectory_by_a_loop
    """,
    "GAE-03": """
        tests/test_rewards.py::test_gae_03_the_score_sits_on_the_last_token_not_on_the_first_pad
        tests/test_steps.py::test_gae_of_the_packed_batch_equals_each_trajectory_by_a_loop
    """,
    "GAE-04": "tests/test_advantages.py::test_gae_04_the_padded_tail_does_not_leak",
    "GAE-05": "tests/test_fault_cases.py::test_gae05_truncated_is_what_the_engine_calls_so",
    "GAE-08": "tests/test_reduce.py::test_gae_08_no_variance_or_nothing_valid",
    "GAE-09": "tests/test_reduce.py::test_gae_09_mean_and_variance_are_both_over_valid_cells",
    "GAE-11": "tests/test_advantages.py::test_gae_11_nothing_crosses_from_one_packed_response_to_another",
    "GAE-12": """
        tests/test_reduce.py::test_gae_12_the_whole_batch_is_whitened_at_once
        tests/test_steps.py::test_gae12_whitening_sees_the_whole_batch
    """,
    "GAE-13": """
        tests/test_advantages.py::test_gae_13_a_response_of_one_token
        tests/test_fault_cases.py::test_gae13_responses_of_one_token_are_trained_on
    """,
    "GAE-16": """
        tests/test_steps.py::test_anchors_equal_each_trajectory_alone
        tests/test_fault_cases.py::test_gae16_values_are_read_before_their_token
    """,
    # log-probabilities
    "LP-01": """
        tests/test_logprobs.py::test_lp_01_target_is_scored_by_the_row_that_predicts_it
        tests/test_steps.py::test_anchors_equal_each_trajectory_alone
    """,
    "LP-02": "tests/test_steps.py::test_anchors_equal_each_trajectory_alone",
    "LP-04": "tests/test_logprobs.py::test_lp_04_entropy_is_that_of_the_tempered_distribution",
    "LP-06": "tests/test_logprobs_gradients.py::test_lp_06_bfloat16_inputs_give_float32_logits",
    "LP-07": "tests/test_logprobs_memory.py::test_lp_07_gradient_keeps_no_chunk_of_logits",
    "LP-08": """
        tests/test_logprobs.py::test_lp_08_no_position_is_lost
        tests/test_logprobs.py::test_lp_08_nothing_to_score
    """,
    "LP-09": "tests/models/test_model.py::test_padding_on_either_side_changes_nothing",
    "LP-10": """
        tests/test_steps.py::test_lp10_old_logprobs_are_the_trainers_or_the_samplers
        tests/rollout/test_trainside.py::test_logprobs_are_those_of_an_uncached_forward
        tests/test_config_checks.py::test_refused
    """,
    # KL and losses
    "KL-01": """
        tests/test_kl.py::test_kl_01_descending_k2_brings_the_policy_to_the_reference
        tests/test_steps.py::test_kl01_a_kl_loss_brings_the_policy_back
    """,
    "KL-02": "tests/test_kl.py::test_kl_02_which_estimator_has_the_gradient_of_the_kl",
    "KL-04": "tests/test_kl.py::test_kl_04_masked_sentinels_reach_neither_value_nor_gradient",
    "KL-06": """
        tests/test_rewards.py::test_kl_06_the_error_is_clipped_to_a_fifth
        tests/test_fault_cases.py::test_kl06_a_coefficient_adapts_by_the_rule_or_stays
    """,
    "PL-03": """
        tests/test_losses.py::test_pl_03_at_ratio_one_the_loss_is_minus_a_with_the_gradient_minus_a
        tests/test_steps.py::test_loss_and_gradient_equal_a_dense_reference
    """,
    "VL-01": "tests/test_losses.py::test_vl_01_the_larger_of_the_two_errors_counts",
    "VL-02": """
        tests/test_losses.py::test_vl_02_the_clip_is_around_the_stored_value
        tests/test_steps.py::test_loss_and_gradient_equal_a_dense_reference
    """,
    "PL-05": "tests/test_steps.py::test_pl05_an_entropy_bonus_raises_entropy",
    "PL-06": """
        tests/test_losses.py::test_pl_06_poison_at_masked_positions_changes_no_output_and_no_gradient
        tests/test_steps.py::test_pl06_poison_at_masked_places_changes_nothing
    """,
    # aggregation
    "AG-02": """
        tests/test_reduce.py::test_ag_02_parts_with_the_global_count_add_up_where_a_mean_of_means_does_not
        tests/test_steps.py::test_the_update_does_not_depend_on_how_the_batch_is_cut
        tests/test_fault_meshes.py::test_me05_a_step_is_the_same_on_every_mesh
    """,
    "AG-04": """
        tests/test_reduce.py::test_ag_04_nothing_valid_gives_zero_and_zero_gradients
        tests/test_steps.py::test_an_update_without_policy_tokens_changes_nothing
        tests/test_fault_cases.py::test_ag04_an_iteration_of_truncated_responses_that_are_masked_moves_nothing
    """,
    "AG-05": """
        tests/test_reduce.py::test_ag_05_a_part_without_tokens_does_not_dilute_the_rest
        tests/test_fault_meshes.py::test_me01_rows_that_no_mesh_divides_are_padded_without_weight
    """,
    "AG-07": """
        tests/test_reduce.py::test_ag_07_each_mode_computes_what_its_name_says
        tests/test_steps.py::test_the_update_does_not_depend_on_how_the_batch_is_cut
    """,
    "AG-08": """
        tests/test_optim.py::test_ag08_the_whole_gradient_is_clipped_not_its_parts
        tests/test_steps.py::test_the_update_does_not_depend_on_how_the_batch_is_cut
    """,
    "AG-10": "tests/test_optim.py::test_ag10_a_linear_schedule_is_half_way_down_at_half_the_optimizer_steps",
    # tokens and packing
    "TK-01": """
        tests/test_prompts.py::test_a_string_becomes_a_user_message_with_exactly_one_bos
        tests/test_prompts.py::test_plain_text_has_the_tokenizers_special_tokens_once
    """,
    "TK-02": """
        tests/test_packing.py::test_tk02_a_stop_token_equal_to_the_padding_id_stays_a_policy_token
        tests/rollout/test_trainside.py::test_padding_is_by_length_whatever_id_it_has
    """,
    "TK-03": """
        tests/models/test_model.py::test_padding_on_either_side_changes_nothing
        tests/rollout/test_trainside.py::test_padding_is_by_length_whatever_id_it_has
    """,
    "TK-07": "tests/test_fault_cases.py::test_tk07_special_tokens_inside_a_response_stay",
    "TK-08": "tests/test_fault_cases.py::test_tk08_a_trimmed_stop_token_is_refused_not_made_up",
    "TK-09": "tests/test_fault_cases.py::test_tk09_a_response_cut_by_the_limit_keeps_its_last_token",
    "TK-11": """
        tests/test_prompts.py::test_cut
        tests/test_prompts.py::test_overlong_prompts_are_dropped_cut_or_refused_and_counted
    """,
    "TK-12": """
        tests/test_prompts.py::test_tokens_outside_the_models_vocabulary_stop_the_run
        tests/checkpoint/test_hf.py::test_a_tokenizer_larger_than_the_embedding_is_refused
    """,
    "PK-01": "tests/models/test_model.py::test_packed_segments_do_not_see_each_other",
    "PK-02": "tests/test_packing.py::test_two_trajectories_share_a_row_by_hand",
    # models and their files
    "MM-01": """
        tests/models/test_weights.py::test_head_dim_is_its_own
        tests/models/test_parity.py::test_logits_equal_transformers
    """,
    "MM-03": "tests/models/test_rope.py::test_llama3_frequencies",
    "MM-04": "tests/models/test_rope.py::test_yarn_frequencies_and_factor",
    "MM-06": """
        tests/models/test_model_config.py::test_windows_of_qwen
        tests/models/test_parity.py::test_logits_equal_transformers
    """,
    "MM-10": "tests/models/test_layers.py::test_rms_norm_statistics_are_float32",
    "MM-11": "tests/models/test_rope.py::test_angles_are_float32",
    "HF-02": """
        tests/checkpoint/test_hf.py::test_a_tied_head_may_be_stored_but_not_differ
        tests/checkpoint/test_hf_export.py::test_changed_parameters_arrive_changed
    """,
    "HF-05": """
        tests/checkpoint/test_hf.py::test_a_file_cut_short_is_named
        tests/checkpoint/test_hf.py::test_a_shard_cut_short_or_missing_is_named
    """,
    "HF-06": "tests/checkpoint/test_hf_export.py::test_transposed_kernels_are_written_in_index_order",
    "HF-07": "tests/checkpoint/test_hf_export.py::test_a_served_folder_has_everything_of_its_source",
    "HF-09": "tests/checkpoint/test_hf.py::test_all_faults_are_listed_at_once",
    # going on after a stop
    "RS-01": """
        tests/checkpoint/test_state.py::test_stopped_and_resumed_equals_uninterrupted
        tests/test_trainer.py::test_rs01_a_resumed_run_equals_one_never_stopped
    """,
    "RS-02": "tests/test_trainer.py::test_rs01_a_resumed_run_equals_one_never_stopped",
    "RS-04": """
        tests/test_trainer.py::test_rs01_a_resumed_run_equals_one_never_stopped
        tests/test_data.py::test_a_restored_cursor_goes_on_as_if_nothing_had_happened
    """,
    "RS-06": """
        tests/checkpoint/test_state.py::test_stopped_and_resumed_equals_uninterrupted
        tests/test_trainer.py::test_rs01_a_resumed_run_equals_one_never_stopped
    """,
    "RS-07": "tests/test_trainer.py::test_rs01_a_resumed_run_equals_one_never_stopped",
    "RS-10": """
        tests/test_trainer.py::test_rs01_a_resumed_run_equals_one_never_stopped
        tests/rollout/test_trainside.py::test_samples_differ_and_reruns_agree
    """,
    "CK-02": "tests/checkpoint/test_state_faults.py::test_failed_save_leaves_the_old_one_and_blocks_nothing",
    "CK-05": """
        tests/checkpoint/test_state_faults.py::test_failed_save_leaves_the_old_one_and_blocks_nothing
        tests/checkpoint/test_state.py::test_after_going_back_the_newest_save_is_the_latest
    """,
    "CK-06": "tests/test_trainer.py::test_ck06_sigterm_saves_the_last_finished_iteration",
    "NF-01": "tests/test_steps.py::test_nf01_a_nan_skips_the_update_and_counts_it",
    "NF-02": "tests/test_trainer.py::test_nf02_non_finite_updates_stop_the_run_and_leave_a_finite_checkpoint",
    "NF-04": "tests/test_optim.py::test_nf04_a_thousand_small_steps_add_up_in_the_float32_master",
    # data and rewards
    "DS-04": "tests/test_data.py::test_fewer_prompts_than_a_batch_are_all_used",
    "DS-06": "tests/test_data.py::test_jsonl_is_split_at_newlines_alone",
    "DS-07": "tests/test_data.py::test_every_epoch_is_a_permutation_of_its_own_fixed_by_the_seed",
    "DS-08": """
        tests/test_steps.py::test_grpo_takes_the_groups_of_rows_not_of_texts
        tests/test_prompts.py::test_equal_prompts_stay_different_rows_and_messages_name_the_file
        tests/test_fault_cases.py::test_ds08_rows_with_one_text_are_groups_of_their_own
    """,
    "RW-01": "tests/test_scoring.py::test_the_wrong_number_of_values_is_refused",
    "RW-03": """
        tests/test_scoring.py::test_invalid_values_are_dropped_when_asked
        tests/test_trainer.py::test_rw03_invalid_rewards_can_be_dropped_and_are_counted
    """,
    "RW-04": """
        tests/test_reward_process.py::test_an_exception_shows_traceback_function_and_prompt_and_is_no_score
        tests/test_trainer.py::test_bad_input_stops_before_any_compute
    """,
    "RW-06": "tests/test_reward_process.py::test_functions_may_use_signal_alarm",
    "RW-07": "tests/test_scoring.py::test_number_types_are_taken_and_strings_are_not",
    # servers
    "RC-01": "tests/rollout/sglang/test_engine.py::test_rc01_proxy_variables_are_for_others",
    "RC-04": "tests/rollout/sglang/test_faults.py::test_what_passes_is_asked_again_with_the_same_id_and_answered_once",
    "RC-05": "tests/rollout/sglang/test_faults.py::test_rc05_what_is_refused_for_good_is_asked_once_and_left_out",
    "RC-07": "tests/rollout/sglang/test_faults.py::test_what_lasts_is_one_clear_error",
    "RC-08": "tests/rollout/sglang/test_faults.py::test_rc08_concurrency_is_bounded_and_waiting_is_no_timeout",
    "RC-09": """
        tests/rollout/sglang/test_replies.py::test_what_is_not_a_whole_answer_is_refused_by_name
        tests/rollout/sglang/test_faults.py::test_rc09_an_answer_that_never_has_logprobs_is_left_out_and_told
    """,
    "RC-10": "tests/rollout/sglang/test_replies.py::test_what_is_not_a_whole_answer_is_refused_by_name",
    "RC-12": """
        tests/rollout/sglang/test_replies.py::test_what_is_not_a_whole_answer_is_refused_by_name
        tests/rollout/sglang/test_replies.py::test_rc12_a_reply_without_a_version_is_of_the_one_that_was_asked
    """,
    "WS-01": "tests/rollout/sglang/test_publishing.py::test_ws01_the_server_runs_what_was_sent_without_its_old_cache",
    "WS-03": """
        tests/rollout/sglang/test_publishing.py::test_ws03_no_success_is_a_failure_whatever_the_status
        tests/rollout/sglang/test_faults.py::test_ws03_a_server_that_says_no_is_not_taken_for_updated
    """,
    "WS-04": """
        tests/rollout/sglang/test_replies.py::test_ws04_versions_are_those_that_sampled_not_that_of_the_reply
        tests/rollout/sglang/test_engine.py::test_weights_published_under_way_are_told_apart_by_token
    """,
    "WS-05": """
        tests/rollout/sglang/test_publishing.py::test_ws05_incomplete_parameters_are_refused_before_anything_is_sent
        tests/rollout/sglang/test_publishing.py::test_confirmation_fails_for_other_numbers_and_other_names
    """,
    "WS-06": """
        tests/rollout/sglang/test_publishing.py::test_ws06_a_tied_embedding_is_followed_as_input_and_as_head
        tests/rollout/sglang/test_faults.py::test_a_server_that_does_not_say_what_the_trainer_says_is_left_out
    """,
    "WS-08": "tests/rollout/sglang/test_engine.py::test_ws08_killed_and_restarted_it_gets_the_weights_before_it_is_asked",
    # meshes
    "ME-01": "tests/test_fault_meshes.py::test_me01_rows_that_no_mesh_divides_are_padded_without_weight",
    "ME-02": "tests/test_sharding.py::test_me02_an_axis_that_does_not_divide_names_parameter_axis_and_sizes",
    "ME-05": "tests/test_fault_meshes.py::test_me05_a_step_is_the_same_on_every_mesh",
    # metrics, settings, seeds
    "ML-01": "tests/test_reduce.py::test_ml_01_the_sentinel_of_pads_is_not_averaged",
    "ML-02": "tests/test_reduce.py::test_ml_02_a_metric_does_not_grow_with_padding",
    "ML-03": "tests/test_losses.py::test_ml_03_only_active_clips_count",
    "ML-04": """
        tests/test_reduce.py::test_ml_04_invalid_parts_are_counted_and_left_out
        tests/test_metrics.py::test_average_leaves_out_what_is_not_finite_and_counts_it
    """,
    "ML-05": "tests/test_metrics.py::test_a_failing_tracker_costs_one_warning",
    "CF-02": """
        tests/test_config_io.py::test_unknown_keys_are_named_with_the_nearest
        tests/test_config_io.py::test_wrong_overrides_say_what_is_wrong
        tests/test_trainer.py::test_a_wrong_key_on_the_command_line_exits_with_one_line
    """,
    "CF-04": "tests/test_fault_options.py::test_cf04_a_setting_changes_what_is_computed",
    "CF-05": """
        tests/test_fault_cases.py::test_cf05_six_responses_in_four_updates_are_all_trained_on
        tests/test_config_checks.py::test_refused
        tests/test_trainer.py::test_bad_input_stops_before_any_compute
    """,
    "RP-02": """
        tests/rollout/test_trainside.py::test_samples_differ_and_reruns_agree
        tests/rollout/sglang/test_engine.py::test_seeds_do_not_depend_on_the_company
    """,
}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_is_held_or_cannot_occur() -> None:
    assert len(IDS) == len(set(IDS)) == 103
    assert not HELD.keys() & CANNOT_OCCUR.keys()
    assert set(IDS) == HELD.keys() | CANNOT_OCCUR.keys()
    assert all(reason.strip() for reason in CANNOT_OCCUR.values())


@pytest.mark.parametrize("fault", HELD)
def test_the_tests_that_hold_it_exist(fault: str) -> None:
    names = HELD[fault].split()
    assert names
    for name in names:
        file, function = name.split("::")
        assert function.startswith("test_") and function in functions_of(file), name
