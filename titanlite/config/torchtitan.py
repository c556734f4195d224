"""torchtitan's job files in tables: its keys beside ours, and its Llama flavors. The facts are those of its versions
0.1.0, 0.2.0, 0.2.1 and 0.2.2.

Invariant: each key of torchtitan's schemas is in exactly one of EQUIVALENT, CONVERTED and WITHOUT.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from titanlite.config.flavors import FLAVORS, Architecture
from titanlite.config.keys import KEYS

Version = Literal["0.1", "0.2"]

_SAME = {
    "job": "dump_folder description",
    "metrics": "log_freq enable_tensorboard enable_wandb",
    "profiling": "enable_profiling profile_freq profiler_active profiler_warmup enable_memory_snapshot",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation",
    "lr_scheduler": "decay_ratio decay_type min_lr_factor",
    "training": """global_batch_size seq_len max_norm steps enable_cpu_offload dtype mixed_precision_param
        mixed_precision_reduce gc_freq seed deterministic""",
    "parallelism": """data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
        tensor_parallel_degree enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_split_points
        pipeline_parallel_schedule context_parallel_degree""",
    "checkpoint": """enable folder interval initial_load_in_hf last_save_model_only last_save_in_hf export_dtype
        async_mode keep_latest_k create_seed_checkpoint""",
    "activation_checkpoint": "mode memory_budget",
    "compile": "enable components",
    "float8": "recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp emulate",
    "comm": "init_timeout_seconds train_timeout_seconds",
}
_RENAMED = {
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.compile": "compile.enable",
    "training.dataloader.num_workers": "dataset.num_workers",
    "training.dataloader.prefetch_factor": "dataset.prefetch",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    **{f"quantize.linear.float8.{key}": f"float8.{key}" for key in _SAME["float8"].split()},
    # Names that files from before 0.1.0 still have.
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
}
EQUIVALENT = {f"{section}.{key}": f"{section}.{key}" for section, keys in _SAME.items() for key in keys.split()}
EQUIVALENT |= _RENAMED
"""Key of torchtitan's -> key of ours that takes the same values."""

CONVERTED = frozenset(
    """
    model.name model.flavor model.converters model.hf_assets_path model.tokenizer_path
    training.dataset training.dataset_path training.local_batch_size lr_scheduler.warmup_steps
    parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_microbatch_size
    checkpoint.initial_load_path checkpoint.load_step checkpoint.exclude_from_loading
    activation_checkpoint.selective_ac_option float8.filter_fqns quantize.linear.float8.filter_fqns
    validation.enable validation.dataset validation.dataset_path validation.local_batch_size validation.seq_len
    validation.freq validation.steps
    """.split()  # noqa: SIM905
)
"""Keys whose value is translated, by `titanlite.config.migrate`."""

WITHOUT = {
    key: reason
    for keys, reason in (
        (
            "profiling.save_traces_folder profiling.save_memory_snapshot_folder",
            "Traces and memory snapshots are always in profile, in job.dump_folder.",
        ),
        (
            "metrics.save_tb_folder",
            "TensorBoard files are always in tb, in job.dump_folder.",
        ),
        (
            "metrics.save_for_all_ranks metrics.disable_color_printing",
            "One rank writes the metrics, which are those of all ranks, and the log has no colours.",
        ),
        (
            "job.config_file",
            "The command line names the job file.",
        ),
        (
            "job.print_args job.print_config job.save_config_file",
            "The resolved job is always written to config.toml in job.dump_folder.",
        ),
        ("job.use_for_integration_test", "It is for torchtitan's own tests."),
        (
            "job.custom_config_module experimental.custom_import experimental.custom_args_module",
            "titanlite loads no code that a job file names. Write a program with its Trainer (docs/python.md).",
        ),
        ("model.print_after_conversion", "titanlite/parallel/float8.py says which layers are converted."),
        (
            "optimizer.early_step_in_backward",
            "The optimizer steps after the gradients are clipped. Against a lack of memory: optimizer.state_dtype.",
        ),
        (
            "lr_scheduler.total_steps",
            "The schedule ends with training.steps. To stop a long schedule early, stop the run; it saves first.",
        ),
        ("training.gc_debug", "Python collects garbage every training.gc_freq steps."),
        (
            """training.dataloader.persistent_workers training.dataloader.pin_memory
            validation.dataloader.num_workers validation.dataloader.persistent_workers
            validation.dataloader.pin_memory validation.dataloader.prefetch_factor""",
            "titanlite's loader decides it. dataset.num_workers and dataset.prefetch are its keys.",
        ),
        (
            """training.debug_moe_force_load_balance debug.moe_force_load_balance parallelism.expert_parallel_degree
            parallelism.expert_tensor_parallel_degree parallelism.expert_parallel_comm_backend
            parallelism.pipeline_parallel_expert_parallel_overlap quantize.grouped_mm.float8.fqns
            quantize.grouped_mm.mx.recipe_name quantize.grouped_mm.mx.fqns
            activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns""",
            "It is for mixtures of experts; titanlite has dense Llamas only.",
        ),
        (
            "debug.deterministic_warn_only",
            "With training.deterministic, a kernel that has no such version ends the run.",
        ),
        (
            "parallelism.enable_compiled_autograd",
            "compile.components says what is compiled; the backward pass of a compiled block is.",
        ),
        ("parallelism.disable_loss_parallel", "With tensor parallelism the loss is always computed in parallel."),
        (
            """parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_first_stage_less_layers
            parallelism.pipeline_parallel_last_stage_less_layers""",
            "Stages are cut to equal cost, with embedding and output included. To cut by hand: "
            "parallelism.pipeline_parallel_split_points.",
        ),
        (
            "parallelism.pipeline_parallel_schedule_csv",
            "parallelism.pipeline_parallel_schedule has the names of the schedules that there are.",
        ),
        (
            "parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method",
            "Context parallelism always gathers keys and values, and gives each rank a chunk from both ends of a row.",
        ),
        (
            "checkpoint.initial_load_model_weights_only checkpoint.initial_load_model_only",
            "initial_load_path takes the weights only. A run goes on by itself from job.dump_folder.",
        ),
        (
            "checkpoint.initial_load_in_hf_quantized",
            "Weights are read as they are. Convert quantized ones first, with transformers.",
        ),
        (
            "checkpoint.enable_first_step_checkpoint",
            "The output folder is tried out before the start. To try a save: --training.steps 1.",
        ),
        (
            "checkpoint.load_only",
            "To read a checkpoint without saving: checkpoint.enable = false, and initial_load_path.",
        ),
        ("checkpoint.interval_type", "checkpoint.interval counts steps."),
        (
            """activation_checkpoint.early_stop activation_checkpoint.visualize_memory_budget_pareto
            activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check
            activation_checkpoint.debug""",
            "activation_checkpoint.mode, selective_ac_option and memory_budget are all that there is. The model has no "
            "random operations, so recomputation gives the same.",
        ),
        ("compile.backend", "The compiler is inductor."),
        (
            "float8.force_recompute_fp8_weight_in_bwd",
            "FSDP gathers the weights of a block again for the backward pass (parallelism.fsdp_reshard_after_forward).",
        ),
        (
            """mx.use_fp8_dim1_cast_triton_kernel mx.recipe_name mx.filter_fqns
            quantize.linear.mx.mxfp8_dim1_cast_kernel_choice quantize.linear.mx.recipe_name
            quantize.linear.mx.filter_fqns""",
            "There is no MXFP8. [float8] has tensorwise and rowwise scales.",
        ),
        (
            "comm.trace_buf_size comm.save_traces_folder comm.save_traces_file_prefix",
            "When a rank hangs, the log says where each one stands. torch's flight recorder: TORCH_FR_BUFFER_SIZE.",
        ),
        ("comm.mode", "`titanlite check --world-size N` checks a job for any number of ranks on one machine."),
        (
            "memory_estimation.enable memory_estimation.enabled memory_estimation.disable_fake_mode",
            "A run that cannot fit into the memory of its GPU is refused at the start.",
        ),
        (
            """fault_tolerance.enable fault_tolerance.process_group fault_tolerance.process_group_timeout_ms
            fault_tolerance.replica_id fault_tolerance.group_size fault_tolerance.min_replica_size
            fault_tolerance.semi_sync_method fault_tolerance.sync_steps fault_tolerance.should_quantize
            fault_tolerance.fragment_sync_delay fault_tolerance.fragment_update_alpha
            checkpoint.enable_ft_dataloader_checkpoints""",
            "There is no torchft. A run that loses a rank or a machine starts again by itself, from its newest "
            "checkpoint, on as many machines as are left (docs/scaling_out.md).",
        ),
    )
    for key in keys.split()
}
"""Key without an equivalent -> the reason, and what to do."""

INSTEAD = {
    "Adam": "With optimizer.weight_decay = 0 the two are the same; with more, torch's Adam adds it to the gradient.",
    "DualPipeV": 'It is for experts. "ZBVZeroBubble" places the stages in the same way.',
}
"""Name of something that titanlite does not have -> what to do."""

ALL = frozenset({*EQUIVALENT, *CONVERTED, *WITHOUT})
SECTIONS = frozenset(key.partition(".")[0] for key in ALL)

# What torchtitan does where a file says nothing, and titanlite does otherwise: values as they are written in TOML.
DEFAULTS = {
    "optimizer.lr": "8e-4",
    "activation_checkpoint.selective_ac_option": '"2"',
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
}

# Keys and sections that only one version has.
ONLY_IN = {
    "0.1": frozenset(
        """
        float8 mx training.compile model.tokenizer_path checkpoint.enable_checkpoint lr_scheduler.lr_min
        checkpoint.last_save_model_weights_only checkpoint.initial_load_model_weights_only memory_estimation.enabled
        job.print_args job.use_for_integration_test
        """.split()  # noqa: SIM905
    ),
    "0.2": frozenset(
        """
        compile quantize validation debug model.hf_assets_path checkpoint.enable checkpoint.last_save_model_only
        checkpoint.initial_load_model_only checkpoint.initial_load_in_hf checkpoint.last_save_in_hf
        lr_scheduler.min_lr_factor training.dtype
        """.split()  # noqa: SIM905
    ),
}
SECTIONS_OF_EXTENSIONS = {
    **dict.fromkeys(("encoder", "eval", "inference"), "Flux"),
    "data": "the vision-language experiment",
    "hf_transformers": "the transformers experiment",
}

_DEBUG = {"n_heads": 16, "n_kv_heads": 16, "ffn_dim": 768, "rope_theta": 500000.0}
_MODELS = {
    "debugmodel": Architecture(256, 6, vocab_size=2048, **_DEBUG),
    **{name.upper(): FLAVORS[name] for name in ("8b", "70b", "405b")},
}
MASKED = ("debugmodel_flex_attn", "debugmodel_varlen_attn", "8B_flex", "8B_varlen")
"""Flavors in which a token attends to its own document only."""
TORCHTITAN_FLAVORS = _MODELS | {name: _MODELS[name.partition("_")[0]] for name in MASKED}


def rotary_scaling(version: Version) -> dict[str, Any]:
    """The rotary scaling of all models of a version: 0.1 has none, 0.2 has that of Llama 3.1."""
    return {"rope_scaling_factor": 8.0 if version == "0.2" else 1.0}


def version_of(keys: Collection[str]) -> Version:
    """The version of a job file with these keys. What both versions have is read as 0.2, and so is a mixture."""
    words = {*keys, *(key.partition(".")[0] for key in keys)}
    return "0.1" if words & ONLY_IN["0.1"] and not words & ONLY_IN["0.2"] else "0.2"


def looks_like_torchtitan(raw: dict[str, Any]) -> bool:
    """Whether a job file has keys or values that are torchtitan's and not ours."""
    for section, table in raw.items():
        for name, value in table.items() if isinstance(table, dict) else ():
            key = f"{section}.{name}"
            if key == "model.flavor" and isinstance(value, str) and value in TORCHTITAN_FLAVORS.keys() - FLAVORS.keys():
                return True
            if key not in KEYS and (key in ALL or any(known.startswith(f"{key}.") for known in ALL)):
                return True
    return False
