"""Job files with the keys and values of those that torchtitan 0.1 and 0.2 come with, and the keys of its schemas."""

OF_02 = """\
# NOTE: this toml config is a preset for 64 A100 GPUs.

[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
# weights and tokenizer
hf_assets_path = "./assets/hf/Llama-3.1-8B"
# converters = ["quantize.linear.float8"]

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200  # lr scheduler warm up

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0  # grad norm clipping
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled" # ["disabled", "async", "async_with_pinned_mem"]

[compile]
enable=false
components = ["model", "loss"]

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = "op"  # a number n: every nth layer

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]

[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = 1200 # for a world of 8 and seq_len=8192
"""

OF_01 = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
print_args = false
use_for_integration_test = true

[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 10
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"

[metrics]
log_freq = 1
disable_color_printing = false
enable_tensorboard = false
save_tb_folder = "tb"
enable_wandb = false

[model]
name = "llama3"
flavor = "debugmodel"
# test tokenizer.model, for debug purpose only
tokenizer_path = "./tests/assets/test_tiktoken.model"
# converters = "float8"

[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 2  # lr scheduler warm up, normally 20% of the train steps
decay_ratio = 0.8  # lr scheduler decay ratio, 80% of the train steps
decay_type = "linear"
lr_min = 0.0

[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0  # grad norm clipping
steps = 10
compile = false
dataset = "c4_test"  # supported datasets: c4_test (2K), c4 (177M)

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default" # default / never / always
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable_checkpoint = false
folder = "checkpoint"
interval = 10
last_save_model_weights_only = false
export_dtype = "float32"
async_mode = "disabled"  # ["disabled", "async", "async_with_pinned_mem"]

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = '2'  # 'int' = ac every positive int layer or 'op', ac based on ops policy

[float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
"""


def changed(text: str, **values: str) -> str:
    """`text` with other values of keys, which are written as TOML. "" leaves a key out, and a key that has no line is
    put at the end of its table: "table__key"."""
    for name, value in values.items():
        table, _, key = name.rpartition("__")
        lines = [line for line in text.split("\n") if line.partition("=")[0].strip() == key]
        line = f"{key} = {value}" if value else ""
        if lines:
            text = text.replace(lines[0], line)
        else:
            head = f"[{table}]"
            text = text.replace(head, f"{head}\n{line}") if head in text else f"{text}\n{head}\n{line}\n"
    return text


SIZE_405B = {
    "flavor": '"405B"',
    "lr": "8e-5",
    "warmup_steps": "600",
    "local_batch_size": "2",
    "steps": "3000",
    "tensor_parallel_degree": "8",
    "enable_fsdp_float8_all_gather": "true",
    "precompute_float8_dynamic_scale_for_fsdp": "true",
    "mode": '"full"',
}
BEFORE_01 = """\
[job]
dump_folder = "./outputs"
use_for_integration_test = true

[metrics]
enable_color_printing = true

[model]
name = "llama3"
flavor = "70B"
norm_type = "rmsnorm"
tokenizer_path = "./torchtitan/datasets/tokenizer/original/tokenizer.model"

[optimizer]
name = "AdamW"
lr = 1.5e-4
fused = true

[training]
batch_size = 8
seq_len = 8192
warmup_steps = 200  # lr scheduler warm up, normally 20% of the train steps
steps = 1000
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 2
tensor_parallel_degree = 2 # 8-way TP
compile = true
dataset = "c4"

[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_split_points = "layers.40"
pipeline_parallel_schedule = "interleaved_1f1b"
pipeline_parallel_microbatches = 4
enable_async_tensor_parallel = true

[checkpoint]
enable_checkpoint = false
interval_type = "steps"
model_weights_only = false

[activation_checkpoint]
mode = 'full'

[float8]
enable_float8_linear = true
enable_fsdp_float8_all_gather = true
"""

JOBS = {
    "0.2 8b": OF_02,
    "0.2 8b_varlen": changed(OF_02, flavor='"8B_varlen"', debug__seed="42"),
    "0.2 405b": changed(
        OF_02.replace("enable=false", "enable=true"), model__converters='["quantize.linear.float8"]', **SIZE_405B
    ),
    "0.1 debug_model": OF_01,
    "0.1 405b": changed(
        OF_01,
        model__converters='["float8"]',
        compile="true",
        seq_len="8192",
        decay_ratio="",
        dataset='"c4"',
        enable_async_tensor_parallel="true",
        **SIZE_405B,
    ),
    "before 70b": BEFORE_01,
}

KEYS_01 = """
job: config_file dump_folder description use_for_integration_test print_args
profiling: enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
model: name flavor tokenizer_path converters print_after_conversion
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps decay_ratio decay_type lr_min
training: dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload
  mixed_precision_param mixed_precision_reduce compile gc_freq gc_debug seed deterministic
parallelism: data_parallel_replicate_degree enable_compiled_autograd data_parallel_shard_degree
  fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel
  pipeline_parallel_degree pipeline_parallel_split_points pipeline_parallel_layers_per_stage
  pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size
  context_parallel_degree context_parallel_rotate_method
checkpoint: enable_checkpoint folder initial_load_path initial_load_model_weights_only interval
  last_save_model_weights_only export_dtype create_seed_checkpoint async_mode keep_latest_k load_step
  exclude_from_loading
activation_checkpoint: mode selective_ac_option
float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd
  recipe_name filter_fqns emulate
mx: use_fp8_dim1_cast_triton_kernel recipe_name filter_fqns
comm: init_timeout_seconds train_timeout_seconds trace_buf_size
memory_estimation: enabled disable_fake_mode
fault_tolerance: enable replica_id group_size min_replica_size semi_sync_method sync_steps should_quantize
  fragment_sync_delay fragment_update_alpha
experimental: custom_import custom_args_module
"""
KEYS_02 = """
job: print_config custom_config_module save_config_file
profiling: profiler_active profiler_warmup
model: hf_assets_path
lr_scheduler: min_lr_factor total_steps
training: dtype debug_moe_force_load_balance dataloader.num_workers dataloader.persistent_workers
  dataloader.pin_memory dataloader.prefetch_factor
parallelism: module_fqns_per_model_part pipeline_parallel_first_stage_less_layers
  pipeline_parallel_last_stage_less_layers expert_parallel_degree expert_tensor_parallel_degree
  pipeline_parallel_expert_parallel_overlap expert_parallel_comm_backend context_parallel_load_balancer
checkpoint: enable enable_ft_dataloader_checkpoints initial_load_model_only initial_load_in_hf
  initial_load_in_hf_quantized last_save_model_only last_save_in_hf enable_first_step_checkpoint load_only
activation_checkpoint: per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget
  visualize_memory_budget_pareto preserve_rng_state determinism_check debug
compile: enable components backend
quantize: linear.float8.enable_fsdp_float8_all_gather linear.float8.precompute_float8_dynamic_scale_for_fsdp
  linear.float8.recipe_name linear.float8.filter_fqns linear.float8.emulate linear.mx.mxfp8_dim1_cast_kernel_choice
  linear.mx.recipe_name linear.mx.filter_fqns grouped_mm.float8.fqns grouped_mm.mx.recipe_name grouped_mm.mx.fqns
comm: save_traces_folder save_traces_file_prefix mode
memory_estimation: enable
fault_tolerance: process_group process_group_timeout_ms
validation: enable dataset dataset_path local_batch_size seq_len freq steps dataloader.num_workers
  dataloader.persistent_workers dataloader.pin_memory dataloader.prefetch_factor
debug: seed deterministic deterministic_warn_only moe_force_load_balance
"""
SCHEMA_KEYS = [
    f"{section}.{key}"
    for text in (KEYS_01, KEYS_02)
    for section, keys in [line.split(": ") for line in text.replace("\n  ", " ").strip().split("\n")]
    for key in keys.split()
]
"""All keys of the schemas of torchtitan 0.1.0, 0.2.0, 0.2.1 and 0.2.2."""
