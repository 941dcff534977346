"""Keys that TRL and peft take, so that a misspelt one is found on a machine that has neither."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

# Fields of trl.GRPOConfig, TRL 1.16.0 with transformers 5.
GRPO = frozenset(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
    adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16 bf16_full_eval
    cache_implementation cast_lm_head_to_fp32 chat_template_kwargs data_seed dataloader_drop_last
    dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed delta disable_dropout disable_tqdm
    do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint entropy_coef entropy_coef_delta
    entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval
    fsdp fsdp_config full_determinism generation_batch_size generation_kwargs gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id
    hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip importance_sampling_level
    include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate
    length_column_name liger_kernel_config load_best_model_at_end local_rank log_completions
    log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts
    logging_first_step logging_nan_inf_filter logging_steps logging_strategy loss_type lr_scheduler_kwargs
    lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_steps
    max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs multi_objective_aggregation
    neftune_noise_alpha num_completions_to_print num_generations num_generations_eval num_iterations
    num_train_epochs off_policy_mask_threshold optim optim_args optim_target_modules output_dir
    pad_to_multiple_of parallelism_config per_device_eval_batch_size per_device_train_batch_size
    prediction_loss_only project push_to_hub ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns
    repetition_penalty report_to restore_callback_states_from_checkpoint resume_from_checkpoint reward_weights
    router_aux_loss_coef run_name sapo_temperature_neg sapo_temperature_pos save_on_each_node save_only_model
    save_steps save_strategy save_total_limit scale_rewards seed shuffle_dataset skip_memory_metrics
    steps_per_generation sync_ref_model temperature tf32 top_entropy_quantile top_k top_p torch_compile
    torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
    trackio_static_space_id train_sampling_strategy transformers_continuous_batching_config trust_remote_code
    use_adaptive_entropy use_bias_correction_kl use_cache use_cpu use_liger_kernel
    use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg vespo_k_pos
    vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode
    vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_structured_outputs_regex vllm_tensor_parallel_size warmup_steps weight_decay
    """.split()  # noqa: SIM905  (a hundred and ninety quoted names are harder to read)
)
# Fields of peft.LoraConfig, peft 0.21.2.
LORA = frozenset(
    """
    alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config
    ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights kasa_config
    layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout
    lora_ga_config megatron_config megatron_core modules_to_save monteclora_config peft_type peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type
    trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config
    """.split()  # noqa: SIM905
)


def check_training(training: Mapping[str, Any]) -> None:
    """Raises: ConfigError when GRPOConfig has no such key, here or, where TRL is not installed, in 1.16."""
    _check(training, GRPO, "training", "trl", "GRPOConfig")


def check_lora(lora: Mapping[str, Any]) -> None:
    """Raises: ConfigError when LoraConfig has no such key, here or, where peft is not installed, in 0.21."""
    _check(lora, LORA, "lora", "peft", "LoraConfig")
    if "task_type" in lora:
        raise ConfigError("`lora` may not set task_type: it is CAUSAL_LM")


def _check(values: Mapping[str, Any], known: frozenset[str], where: str, package: str, name: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown and importlib.util.find_spec(package):
        # A newer release may have it; loading the package takes seconds, so only now.
        theirs = getattr(importlib.import_module(package), name)
        known = frozenset(f.name for f in dataclasses.fields(theirs) if f.init)
        unknown = sorted(set(values) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(f"`{where}`: {package}'s {name} has no key `{unknown[0]}`{hint}")
