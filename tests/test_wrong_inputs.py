"""Wrong inputs end at once with a documented exit code and a clear error, and change no file."""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from commands.test_saved_models import save_run

from titanlite import cli
from titanlite.config.errors import UserError
from titanlite.config.options import Generation

JOB = "[training]\nsteps = 10\nseq_len = 64\n"
TEXT = "".join(
    json.dumps({"text": f"document {i}: " + "some words to learn from. " * 20}) + "\n"
    for i in range(50)
)


class Case(NamedTuple):
    """A shell command with variables, text that the error must contain, and another file."""

    command: str
    named: str
    file: str = ""
    content: str | bytes = ""
    code: int = 2


def lines(table: str) -> list[tuple[str, str]]:
    """Split the lines of a table into inputs and texts that the error must contain."""
    rows = [f" {line} ".rpartition(" => ") for line in table.strip().split("\n")]
    return [(left.strip(), right.strip()) for left, _, right in rows]


# Each line is a job file (";" separates its lines), after the number of ranks if it is not 1. The
# error must contain the text after "=>", or else the first key. A backslash continues a long line.
JOBS = """
steps : 5 => bad.toml
training.lr = 1.0 => optimizer.lr
metrics.qqqqq = 1 => log_freq
steps = 5 => training.steps
training = 5 =>
job.descripton = "\\u001b[2J" => job.description
training.steps = "5" =>
training.steps = 0 =>
training.steps = 1e6 => Write 1000000.
training.steps = 10_000_000_000 =>
training.max_norm = -1.0 =>
training.global_batch_size = 0 =>
parallelism.data_parallel_shard_degree = 0 => parallelism.
model.flavor = "7b" =>
model.head_dim = 7 =>
model.n_kv_heads = 3 =>
tokenizer.path = "nowhere.model" => tokenizer.path cannot
tokenizer.path = "job.toml" =>
dataset.source = "jsonl" => dataset.path
dataset.path = "text.jsonl" => dataset.source
dataset.source = "shards" ; dataset.path = "." => dataset.path
dataset.path = "text.jsonl" ; [[dataset.sources]] ; source = "c4" =>
model.name = "llama3" => titanlite migrate
[[dataset.sources]] ; sorce = 1 => dataset.sources.0.sorce
[[dataset.sources]] ; source = "jsonl" => dataset.sources.0.path
[[dataset.sources]] ; source = "jsonl" ; path = "dataset.jsonl" => matches no file (current
[[dataset.sources]] ; source = "c4" ; loss_mask_column = "x" => dataset.sources.0.loss_mask_column
dataset.loss_mask_column = "x" ; [[dataset.sources]] ; source = "c4" => dataset.loss_mask_column
dataset.split = "test" ; dataset.source = "jsonl" ; dataset.path = "text.jsonl" =>
dataset.config = "en" =>
dataset.streaming = true ; dataset.source = "text" ; dataset.path = "text.jsonl" =>
[[dataset.sources]] ; source = "c4" ; token_dtype = "uint16" => dataset.sources.0.token_dtype
[[dataset.sources]] ; source = "c4" ; weight = 0.0 => dataset.sources.0.weight
[[dataset.sources]] ; source = "c4" ; [[dataset.stages]] ; start_step = 1 ; weights = [0] \
=> dataset.stages.0.weights
[[dataset.sources]] ; source = "c4" ; [[dataset.sources]] ; [[dataset.stages]] ; start_step = 1 \
; weights = [1.0] => dataset.stages.0.weights
[[dataset.stages]] ; start_step = 1 ; weights = [1.0, 1.0] => must have 1 weights
[[dataset.stages]] ; start_step = 1 ; lr_factor = 0.5 ; [[dataset.stages]] ; start_step = 1 \
=> dataset.stages.1.start_step
[[dataset.stages]] ; start_step = 1 ; global_batch_size = 12 => dataset.stages.0.global_batch_size
validation.freq = 5 =>
validation.holdout = 0.1 ; validation.path = "text.jsonl" => validation.path
optimizer.lr = nan =>
optimizer.lr = 30.0 =>
optimizer.beta2 = 0.999 ; optimizer.state_dtype = "bfloat16" =>
optimizer.beta1 = 0.8 ; optimizer.name = "SGD" =>
metrics.details = ["updates"] ; optimizer.name = "Muon" =>
optimizer.name = "AdamW8bit" ; training.enable_cpu_offload = true =>
model.mup_base_dim = 2147483648 =>
model.mup_base_dim = 64 ; optimizer.name = "Muon" => optimizer.name
[[optimizer.groups]] ; lr_factor = 2.0 => optimizer.groups.0.params
[[optimizer.groups]] ; params = ["*", "layers.9.*"] => layers.9.*
[[optimizer.groups]] ; params = ["layers.*", "tok_*"] => in no group: norm.weight and 1 more
[[optimizer.groups]] ; params = ["*"] ; [[optimizer.groups]] ; params = ["norm.*"] \
=> of another group: norm.weight
lr_scheduler.warmup_steps = 9 ; training.steps = 5 =>
lr_scheduler.decay_steps = 9 ; training.steps = 5 =>
lr_scheduler.decay_steps = 91 ; training.steps = 100 =>
lr_scheduler.decay_steps = "2B" ; training.tokens = "1B" \
=> "2B" makes the learning rate decay for 122070 steps
lr_scheduler.decay_ratio = 0.5 ; lr_scheduler.decay_steps = 9 =>
lr_scheduler.warmup_steps = "500X" =>
training.tokens = "10X" =>
training.tokens = 0 =>
training.tokens = "1K" => training.tokens = "1K" makes 0 steps of 16,384 tokens
training.tokens = 1e9 =>
training.tokens = "1000T" =>
training.steps = 5 ; training.tokens = "1B" => training.steps = 5 is not used with training.tokens
training.tokens = "1B" ; training.tokens_per_parameter = 20 =>
training.tokens_per_parameter = 0.0 =>
training.tokens_per_parameter = 1e-9 =>
training.tokens_per_parameter = 1e308 =>
training.tokens = "64M" ; lr_scheduler.warmup_steps = "6.4B" \
=> "6.4B" makes the learning rate rise for 390625 steps
training.tokens = "64M" ; lr_scheduler.total_steps = "2K" => "2K" makes 0 steps of 16,384 tokens
checkpoint.interval = "1K" =>
checkpoint.interval = "500" =>
validation.freq = "1K" ; validation.holdout = 0.1 =>
lr_scheduler.total_steps = 4 ; training.steps = 5 =>
activation_checkpoint.selective_ac_option = "0" =>
activation_checkpoint.mode = "memory_budget" =>
float8.enable = true =>
training.seq_len = 100 ; training.local_batch_size = 1 ; float8.enable = true \
; float8.min_features = 0 =>
training.seq_len = 16 ; training.local_batch_size = 1 ; float8.enable = true \
; float8.recipe_name = "mxfp8" ; float8.min_features = 0 => multiples of 32
float8.enable = true ; float8.recipe_name = "mxfp4" => float8.recipe_name
checkpoint.async_mode = "process" => 'async'
validation.sources = [{source = "c4", max_epochs = 2}] => no longer a key
checkpoint.keep_best = true =>
checkpoint.initial_load_path = "nowhere" =>
checkpoint.initial_load_path = "nowhere" ; checkpoint.enable = false => without checkpoint.enable
checkpoint.load_step = 5 ; checkpoint.enable = false => without checkpoint.enable
checkpoint.last_save_in_hf = true ; checkpoint.enable = false => without checkpoint.enable
checkpoint.timeout_seconds = 100000000000000 =>
dataset.max_epochs = 2 ; dataset.sources = [{source = "c4"}] => dataset.max_epochs = 2 is not used
dataset.text_column = "body" ; dataset.sources = [{source = "c4"}] => dataset.text_column
samples.freq = 5 =>
samples.prompts = ["def"] =>
compile.enable = true ; compile.components = [] =>
compile.components = ["model"] =>
float8.recipe_name = "mxfp8" =>
checkpoint.initial_load_in_hf = true =>
validation.source = "c4" =>
validation.source = "c4" ; validation.holdout = 0.1 =>
validation.split = "x" ; validation.holdout = 0.1 =>
validation.text_column = "x" ; validation.holdout = 0.1 =>
validation.path = "text.jsonl" ; validation.source = "jsonl" => validation.path
float8.enable_fsdp_float8_all_gather = true ; float8.recipe_name = "rowwise" \
=> float8.enable_fsdp_float8_all_gather
float8.precompute_float8_dynamic_scale_for_fsdp = true =>
optimizer.stochastic_rounding = true =>
parallelism.enable_async_tensor_parallel = true =>
model.full_attention_interval = 4 =>
model.rope_high_freq_factor = 1.0 =>
model.rope_theta = 1.0 =>
model.rope_theta = 1e300 =>
model.rope_beta_fast = 1e308 =>
model.rope_beta_slow = 1e-320 =>
model.rope_low_freq_factor = 1e-320 =>
model.rope_scaling_factor = 1e300 =>
model.rope_attention_factor = 1e300 =>
model.rope_attention_factor = 1e-320 =>
model.norm_eps = 1e300 =>
model.logit_softcap = 1e-320 =>
model.logit_softcap = 1e308 =>
training.z_loss = 1e308 =>
training.max_norm = 1e-320 =>
[[dataset.sources]] ; source = "c4" ; weight = 1e-320 => dataset.sources.0.weight
[[dataset.sources]] ; source = "c4" ; [[dataset.stages]] ; start_step = 1 ; weights = [1e308] \
    => dataset.stages.0.weights
[[dataset.stages]] ; start_step = 1 ; lr_factor = 1e308 => dataset.stages.0.lr_factor
[[dataset.stages]] ; start_step = 1 ; lr_factor = 1e-320 => dataset.stages.0.lr_factor
optimizer.lr = 1e-320 => must be at least 1e-30
optimizer.eps = 1e-320 =>
optimizer.eps = 1e300 =>
optimizer.weight_decay = 1e308 =>
[[optimizer.groups]] ; params = ["*"] ; lr_factor = 1e308 => optimizer.groups.0.lr_factor
[[optimizer.groups]] ; params = ["*"] ; weight_decay = 1e308 => optimizer.groups.0.weight_decay
checkpoint.mirror_mbps = 1e-320 =>
model.rope_beta_fast = 1.0 ; model.rope_scaling = "yarn" =>
parallelism.pipeline_parallel_split_points = ["layers.2"] =>
profiling.profiler_ranks = [1] =>
checkpoint.folder = "/etc/passwd" =>
checkpoint.folder = "tb" =>
metrics.loggers = ["none_such"] =>
samples.freq = 5 ; samples.prompts = ["word word word word"] ; training.seq_len = 2 \
=> samples.prompts
profiling.profile_freq = 3 => profiling.profile_freq
parallelism.memory_savers = "most" =>
parallelism.fsdp_forward_prefetch = 1 =>
parallelism.enable_fsdp_symmetric_memory = true ; parallelism.memory_savers = "none" =>
@2 parallelism.enable_fsdp_symmetric_memory = true =>
@4 parallelism.enable_fsdp_symmetric_memory = true ; parallelism.memory_savers = "none" \
    ; parallelism.tensor_parallel_degree = 2 ; compile.enable = true \
    ; parallelism.enable_async_tensor_parallel = true => enable_async_tensor_parallel. Remove
@4 parallelism.data_parallel_replicate_degree = 3 =>
@3 parallelism.tensor_parallel_degree = 3 =>
@2 parallelism.tensor_parallel_degree = 2 ; model.ffn_dim = 720 ; float8.enable = true \
; float8.min_features = 0 =>
@2 parallelism.tensor_parallel_degree = 2 ; float8.enable = true ; float8.recipe_name = "mxfp8" \
; float8.min_features = 0 => multiples of 128
@2 training.global_batch_size = 12 ; training.local_batch_size = 4 =>
@7 parallelism.pipeline_parallel_degree = 7 ; training.global_batch_size = 56 =>
@2 model.tied_embeddings = true ; parallelism.pipeline_parallel_degree = 2 \
; training.global_batch_size = 16 =>
@2 parallelism.fsdp_reduce = "microbatch" ; parallelism.pipeline_parallel_degree = 2 =>
@2 parallelism.pipeline_parallel_split_points = ["layers.2", "layers.4"] \
; parallelism.pipeline_parallel_degree = 2 =>
"""


# torchtitan job files in the same format.
THEIRS = """
encoder.t5_encoder = 'x' =>
optimizer.wd = 0.1 => mean optimizer.weight_decay
model.flavor = "13B" => model.flavor = "13B"
model.hf_assets_path = 5 =>
model.converters = 5 => 5: must be a list
training.seq_len = [5] => training.seq_len = [5]
training.dataset = "mine" => dataset_path
parallelism.module_fqns_per_model_part = [[1], [2]] =>
training.seed = 1 ; debug.seed = 2 => training.seed and debug.seed
[[training]] ; steps = 1 => training
validation.enable = true ; validation.freq = 'x' => validation.freq must be an integer
optimizer.name = 'Adam' => AdamW
"""


def job_cases(table: str, command: str) -> Iterator[Case]:
    for text, named in lines(table):
        ranks = "1"
        if text.startswith("@"):
            ranks, text = text[1:].split(" ", 1)
        key = named or text.partition(" =")[0]
        yield Case(command.format(ranks), key, "bad.toml", text.replace(" ; ", "\n"))


NAME_OF_300 = f'[job]\ndump_folder = "{"x" * 300}"'
DEEP = "[training]\nsteps = " + "[" * 2000 + "]" * 2000
LONG = "[training]\nsteps = " + "9" * 5000
BAD_FILES = [
    JOB.encode("utf-16"),
    b'[job]\ndescription = "\xe9"',
    b"\0" * 100,
    DEEP,
    LONG,
    NAME_OF_300,
]

SMALL = "--training.seq_len 64 --training.steps 10"
LOOK = f"check {SMALL} --dataset.source"
SHOW = f"data show {SMALL} --dataset.source jsonl --dataset.path"
PREPARE = "prepare --workers 1 --dataset.source jsonl --dataset.path"
MASTER = "NNODES=2 MASTER_ADDR=localhost"
COMMANDS = f"""
=> titanlite COMMAND
trane => titanlite train
plan --wirte=plan.toml => Did you mean --write?
check --from a --from b => takes one folder
check --from= => takes one folder
check --from '--job.description=a b' => takes one folder
check --config job.toml => Did you mean job.config_file?
check --data.config en => Did you mean dataset.config
check --validaton.path x => Did you mean validation.path
tarin => Try `titanlite train`
llama_8b.toml => titanlite llama_8b.toml
--training.steps 5 => `titanlite train ...`
help nothing_at_all => nothing_at_all
help chekpoint => mean checkpoint?
help training.stepps => training.steps
train --config job.toml => job.config_file
check --job.config_file nowhere.toml => nowhere.toml
check --job.config_file run => run
train job.toml => --job.config_file
train --training.stpes 5 => training.steps
check -training.steps 5 => -training.steps
check --training.steps => --training.steps
check --training.steps 5 6 => 6
check --compile.enable true => --compile.no-enable
check --compile.enable false --compile.components loss --training.steps 0 => 2 mistakes
check --checkpoint.no-no-enable => --checkpoint.no-no-enable
check --training.no-steps => --training.no-steps
get data me/lines/data => tinystories
check --training.num_threads 10000 => training.num_threads
check --model.flavor llama-7b => mean llama2-7b?
check --model.flavor llama3-8b => mean 8b?
check --model.flavor someone/Llama-3.1-8B => mean 8b?
check --optimizer.wd 0.1 => optimizer.weight_decay
check --training.grad_accum_steps 4 => training.global_batch_size
check --device_batch_size 4 => training.local_batch_size
check --job.dump_folder $HOME/out => Write the path itself
check --job.dump_folder '$UNSET_HERE/out' => UNSET_HERE
average run --out x => CHECKPOINTS
average run run --out empty => empty is not empty
average run run --out x --weights 1 => --weights
average run/checkpoint/step-00000010 run --out x --weights 1e308 1e308 => --weights
check --profiling.profiler_ranks 0,1 => 0 1 on the command line
check --training.steps 4 --lr_scheduler.warmup_steps 10 => lr_scheduler.warmup_steps
check --training.steps 40 --lr_scheduler.decay_steps 50 => lr_scheduler.decay_steps
check --optimizer.name AdamWW => one of AdamW,
check --training.loss referenc => one of cross_entropy, reference
check --dataset.sources x => [[dataset.sources]]
check --dataset.sources.0.path x => [[dataset.sources]]
check --training.steps.5 3 => --training.steps.5
check --training.steps.seed 3 => mean training.seed
check --training.steps.sede 3 => Known tables are job,
check --1 x => --1
check --training.local_batch_size 1000000000 => training.local_batch_size
check --world-sise 4 => --world-size
check --world-size many => --world-size must be an integer, got 'many'
check --world-size "it's" => --world-size must be an integer, got "it's"
check --training.0.steps 5 => training.0.steps is unknown
check --parallelism.pipeline_parallel_degree 7 --parallelism.tensor_parallel_degree 3 => 4 mistakes
check --parallelism.tensor_parallel_degree 3 => must divide model.n_kv_heads
check --tokenizer.path nofile.json => read nofile.json
check --tokenizer.path me/mine => titanlite get tokenizer me/mine
check --tokenizer.path nofile.model --model.flavor 8b => titanlite get tokenizer llama3
check --tokenizer.path run => run/tokenizer.json
check --checkpoint.load_step 7 => checkpoint.load_step = 7
check --checkpoint.load_step 15 --job.dump_folder run => step-00000020
check --checkpoint.initial_load_path . => checkpoint.initial_load_path
check --dataset.source jsonl --dataset.path run => run/*.jsonl
check --dataset.source parquet --dataset.path data/fineweb-edu-10bt/*.parquet => --include
check --validation.no-document-mask => no longer a key
prepare --out => --out
prepare --job.config_file job.toml => --out
prepare --out x --workers 1 --dataset.source shards --dataset.path run => run
prepare --out x --workers 1 --dataset.source tokens --dataset.path text.jsonl \
=> dataset.source is tokens
prepare --out x --workers 1 --dataset.source jsonl --dataset.path text.jsonl \
--dataset.loss_mask_column x => dataset.loss_mask_column
{PREPARE} text.jsonl --out text.jsonl => text.jsonl
{PREPARE} text.jsonl --out text.jsonl/out => text.jsonl
{PREPARE} text.jsonl --out no_object => no_object/manifest.json
{PREPARE} text.jsonl --out foreign => foreign is not empty
{PREPARE} bad_end.jsonl --out x => bad_end.jsonl
{PREPARE} cut.jsonl.gz --out x => cut.jsonl.gz
{PREPARE} no.jsonl.zst --out x => no.jsonl.zst
{LOOK} jsonl --dataset.path no.jsonl.gz => no.jsonl.gz
{LOOK} jsonl --dataset.path empty_texts.jsonl --validation.holdout 0.1 => text_column
{LOOK} jsonl --dataset.path skipped.jsonl --dataset.on_bad_record skip \
=> Skipped 1 record; the first one: skipped.jsonl, line 2
{LOOK} jsonl --dataset.path chat.jsonl --dataset.on_bad_record skip => no field 'text'
{LOOK} parquet --dataset.path no.parquet => no.parquet
{LOOK} text --dataset.path binary.txt => binary.txt
{LOOK} shards --dataset.path broken_shards => broken_shards
{LOOK} arrow --dataset.path no_arrow => no_arrow
{SHOW} short.jsonl => fewer than the
{PREPARE} text.jsonl --out run/checkpoint/step-00000010/x => step-00000010
{PREPARE} text.jsonl --out /proc/x => /proc/x
data list => list
data show --sequence 99 {SMALL} => --sequence 99
{SHOW} text.jsonl --rank 5 => --rank
{SHOW} text.jsonl --training.steps 99 --step 99 --dataset.max_epochs 1 => step 99 does not exist
{SHOW} nowhere.jsonl => nowhere.jsonl
{SHOW} /dev/null => /dev/null
check --dataset.source jsonl --dataset.path text.jsonl --dataset.text_column body \
=> Set dataset.text_column
data show {SMALL} --dataset.source huggingface --dataset.path ./nowhere => nowhere
generate --prompt x => --checkpoint
generate --checkpoint run --temperature -1 => temperature
generate --checkpoint run --topk 3 => --top-k
generate --checkpoint run --max_tokens 5 => --max-new-tokens
generate --checkpoint run --stop x => --stop
eval --checkpoint run --data text.jsonl --data text.jsonl => --data
import --hf run --flavor 8b --out x => --job.config_file
import --torchtitan run --model.flavor qwen2.5-7b --out x => qkv_bias
tokenizer train --data x --vocab-size 600 --out y => mean dataset.path?
data show --step 999999999999 => training.steps
check --training => --training.steps
help --foo => --foo
train --help training --foo => --foo
generate --checkpoint run/checkpoint/step-00000099 --prompt x => step-00000099
generate --checkpoint run --prompt '{"word " * 90}' => --prompt
generate --checkpoint run --prompt x --prompts job.toml => --prompts
generate --checkpoint run --prompts text.jsonl => --prompts text.jsonl
eval --checkpoint run --data nowhere.txt => nowhere.txt
eval --checkpoint run --data text.jsonl --text-column body => --text-column
eval --checkpoint run --data text.jsonl --window 65 => --window 65
eval --checkpoint run --data text.jsonl --stride 48 => --stride 48
eval --checkpoint run --data text.jsonl --training.steps 5 => --training.steps
eval --checkpoint run --data text.jsonl --parallelism.tensor 2 => --parallelism.tensor
eval --checkpoint run --data text.jsonl --parallelism.tensor_parallel_degree 2 \
=> parallelism.tensor_parallel_degree
export --checkpoint run --out x --dtype int8 => float32
export --checkpoint run hurt --out x => hurt
export --checkpoint run/checkpoint --out run => run
export --checkpoint run/checkpoint --out x --tokenizer nowhere.json => nowhere.json
import --out x => --hf
import --out x --hf a --meta b => --hf
import --hf nowhere --out x => nowhere
import --hf empty --out x => empty
import --hf broken --out x => config.json
import --hf other_model --out x => config.json
import --meta broken --out x => broken
check --from empty => neither a config.json
check --from other_model => gpt2
check --from encoder => is_causal
train --job.dump_folder blocked => checkpoint
train --job.dump_folder folders => train.log
train --job.dump_folder pipes => train.log
verify => DIR
tokenizer => --vocab-size
tokenizer train --vocab-size 5 --out x => --vocab-size must be greater than 512
tokenizer train --vocab-size 600 --out x --data text.jsonl => --data
tokenizer train --vocab-size 600 --out made => made/tokenizer.json already exists
tokenizer train --vocab-size 100000 --out x --dataset.source jsonl --dataset.path text.jsonl \
=> too small for 100,000 ids
tokenizer train --vocab-size 600 --out x --dataset.source tokens --dataset.path ids.npy \
--dataset.token_dtype uint16 => ids.npy contains tokens instead of text.
tokenizer train --vocab-size 600 --out x --dataset.path text.jsonl => dataset.path = "text.jsonl"
check --dataset.source jsonl --dataset.path nowhere*.jsonl \
=> command line: dataset.path = "nowhere*.jsonl"
check --hidden_size 512 => model.dim
check --num_train_epochs 3 => dataset.max_epochs
check --model.dim 1000000000 => model.dim = 1000000000
check --model.dim 1000000000 --world-size 64 --training.enable_cpu_offload => model.dim = 1000000000
eval --checkpoint run --data no*.md => no*.md
report => titanlite report DIR
plan --gpu A100-80 => --gpu A100-80: unknown. Use one of
plan --gpu none.toml => none.toml
plan --memory 1e300 => memory
plan --memory 80GB => --memory must be a number, got '80GB'
plan --tokens 10X => --tokens 10X
plan --tokens 0 => --tokens 0
plan --tokens nan => --tokens nan
plan --tokens -5B => --tokens
plan --tokens 1e400 => --tokens 1e400
plan --tokens 1T --gpu cpu => --tokens
get --out x => KIND
replay --step 1 => DIR
get data me/lines --from '' => --from
plan --quick --write job.toml => --write job.toml: already exists
import --hf run --out x --foo 1 => --foo
check --dataset.source text --dataset.path packed.gz => decompress
report run --out job.toml => --out job.toml
report run --out pipe => pipe
report nowhere => nowhere
watch nowhere => nowhere
replay nowhere --step 1 => nowhere
runs nowhere => nowhere
migrate => FILE
migrate nowhere.toml => nowhere.toml
migrate pipe => pipe
migrate job.toml --out text.jsonl => text.jsonl
migrate job.toml --out /proc/new.toml => /proc
migrate job.toml --torchtitan-version 0.3 => 0.3
train --job.dump_folder /proc/out => job.dump_folder
train --job.dump_folder run/checkpoint/step-00000010/x => step-00000010
train --job.dump_folder job.toml => job.toml
train --checkpoint.folder ../../dangling => dangling
WORLD_SIZE=3 train --training.global_batch_size 8 => 3 data-parallel ranks
WORLD_SIZE=two check => WORLD_SIZE
OMP_NUM_THREADS=abc check => OMP_NUM_THREADS
OMP_NUM_THREADS=0 launch => OMP_NUM_THREADS
WORLD_SIZE=1000000000000 check => WORLD_SIZE
RANK={"9" * 5000} check => RANK
RANK=2 WORLD_SIZE=2 check => RANK=2
LOCAL_RANK=first check => LOCAL_RANK
LOCAL_WORLD_SIZE=0 check => LOCAL_WORLD_SIZE
WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=http eval --checkpoint run --data text.jsonl \
=> 'http'
WORLD_SIZE=2 MASTER_PORT=29500 eval --checkpoint run --data text.jsonl => variable MASTER_ADDR
WORLD_SIZE=2 MASTER_ADDR=localhost eval --checkpoint run --data text.jsonl => variable MASTER_PORT
LOG_RANK=7 launch => LOG_RANK
NGPU=all launch => NGPU
NGPU=999999999999 launch => NGPU
NNODES=many launch => NNODES
NNODES=2 launch => MASTER_ADDR
NNODES=2 MASTER_ADDR=no-such-node.invalid launch => no-such-node.invalid
{MASTER} NODE_RANK=-1 launch => NODE_RANK
{MASTER} NODE_RANK=2 launch => NODE_RANK
NNODES=2:1 launch => NNODES=2:1
{MASTER} NODE_RANK=0 MASTER_PORT=http launch => MASTER_PORT
MAX_RESTARTS=often launch => MAX_RESTARTS
NGPU=2 NNODES=1:3 MASTER_ADDR=here launch --training.global_batch_size 8 => 6 data-parallel ranks
profile --steps 1e9 => --steps must be an integer, got '1e9'
prove --out job.toml => --out
NGPU=two prove => NGPU
NGPU=0 prove => NGPU
prove --world-size 500 => --world-size 500
prove --parallelism.tensor_parallel_degree 3 => parallelism.tensor_parallel_degree
WORLD_SIZE=3 prove --parallelism.tensor_parallel_degree 2 => --world-size 3
profile --out /proc/none => /proc/none
launch --nproc_per_node 2 => NGPU=N
"""

# Files in the working folder of each case
FILES: dict[str, str | bytes] = {
    "job.toml": JOB,
    "text.jsonl": TEXT,
    "packed.gz": "",
    "short.jsonl": '{"text": "a"}',
    "empty_texts.jsonl": '{"text": ""}\n' * 9,
    "skipped.jsonl": '{"text": ""}\n{"text": 5}\n{"text": ""}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n' * 9,
    "ids.npy": "tokens",
    "bad_end.jsonl": TEXT + "no\n",
    "cut.jsonl.gz": gzip.compress(TEXT.encode())[:-20],
    "no.jsonl.gz": "no",
    "no.jsonl.zst": "no",
    "no.parquet": "no",
    "binary.txt": bytes(range(256)),
    "broken_shards/manifest.json": "{",
    "no_arrow/dataset_info.json": "{}",
    "empty/readme": "",
    "broken/config.json": "{",
    "broken/params.json": "{",
    "broken/step-00000010/manifest.json": "{",
    "no_object/manifest.json": "[]",
    "list/step-00000010/manifest.json": "[]",
    "foreign/shard-00000.bin": "",
    "made/tokenizer.json": "",
    "other_model/config.json": '{"model_type": "gpt2"}',
    "encoder/config.json": '{"model_type": "llama", "is_causal": false}',
    "moved/checkpoint/step-00000010.damaged/x": "",
    "blocked/checkpoint": "",
    "folders/train.log/x": "",
    "pipes/x": "",
}

# Lines that are invalid TOML -> text in the error
NO_TOML = {
    "[model]\nflavor = 8b": "line 3: flavor = 8b is not valid TOML",
    "enable = True": "true and false in lower case",
    "steps: 5": "key = value",
    "training:": "[section]",
    "seed = None": "leave out keys",
    "source = 'jsonl\n": "Close quotation marks",
    'source = "jsonl\n': "Close quotation marks",
    'path = "C:\\data"': "single quotation marks",
    "a = 1\na = 2": "once",
}

# Contents of JSON Lines files.
BAD_TEXT: list[str | bytes] = [
    "",
    "hello\n" * 50,
    '[{"text": "a"}]',
    '{"body": "a"}\n' * 9,
    '{"text": 5}\n' * 9,
    '{"text": ""}\n' * 9,
    b'{"text": "\xff\xfe"}\n' * 50,
    json.dumps([{"text": "a"}] * 9, indent=2),
    TEXT.encode("utf-16"),
    ("[" * 100000 + "]" * 100000 + "\n") * 2,
    b"PK\x03\x04" + bytes(range(256)) * 9,
]
BAD_TOKENIZERS: list[tuple[str, str | bytes]] = [
    ("bad.model", ""),
    ("bad.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0"),
    ("bad.model", "YQ==\n"),
    ("bad.model", "YQ== one\n"),
    ("bad.model", "YQ== 1000000000000\n"),
    ("bad.json", "{"),
    ("bad.json", '{"a": 1}'),
    ("bad.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
    ("bad.json", "[" * 100_000),
]
# Commands that end with exit code 4
DAMAGED = """
verify empty => empty
verify moved => damaged
check --job.dump_folder moved => damaged
verify hurt/checkpoint/step-00000020 => damaged
generate --checkpoint hurt/checkpoint/step-00000020 => damaged
generate --checkpoint broken/step-00000010 => damaged
verify list => step-00000010
"""
# Files for `titanlite migrate`.
OTHERS = [
    b'[job]\ndescription = "\xe9"',
    b"# \x1b[2J",
    b"#" * (1 << 20),
    "[" + ".".join("a" * 5000) + "]\nb = 1",
    "steps : 5",
    DEEP,
    '[model]\nname = "llama4"',
    "[training]\nsteps = 5.5",
    '[dataset]\nsource = "c4"',
]
CASES = [
    *job_cases(JOBS, "check --job.config_file bad.toml --world-size {}"),
    *job_cases(THEIRS, "migrate bad.toml"),
    *(Case(command, named) for command, named in lines(COMMANDS)),
    *(Case(command, named, code=4) for command, named in lines(DAMAGED)),
]
CHECK_JOB = "check --job.config_file bad.toml"
CASES += [Case(CHECK_JOB, "bad.toml", "bad.toml", content) for content in BAD_FILES]
CASES += [Case(CHECK_JOB, named, "bad.toml", f"[a]\n{line}") for line, named in NO_TOML.items()]
CASES += [
    Case(f"{LOOK} jsonl --dataset.path bad.jsonl", "bad.jsonl", "bad.jsonl", text)
    for text in BAD_TEXT
]
CASES += [Case(f"check --tokenizer.path {name}", name, name, text) for name, text in BAD_TOKENIZERS]
CASES += [Case("migrate old.toml", "old.toml", "old.toml", content) for content in OTHERS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Create `run`, the output of a training run, and `hurt`, a copy with a damaged checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run").mkdir()
    save_run(folder / "run", 10, 20)
    shutil.copytree(folder / "run", folder / "hurt")
    weights = next((folder / "hurt/checkpoint/step-00000020").glob("*.distcp"))
    # Every byte changes, because commands verify only the tensors that they read.
    weights.write_bytes(bytes(byte ^ 0xFF for byte in weights.read_bytes()))
    return folder


def write_file(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def folder(runs, tmp_path, monkeypatch) -> Iterator[Path]:
    """Create the working folder of a case, and fail the case after a minute."""
    for name in ("run", "hurt"):
        shutil.copytree(runs / name, tmp_path / name, copy_function=os.link)
    for name, content in FILES.items():
        write_file(tmp_path / name, content)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipes" / "train.log")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def wrong(*_: object) -> None:
        raise AssertionError("the run was started, or a case waits for something")

    monkeypatch.setattr("titanlite.train.trainer.train", wrong)
    monkeypatch.setattr("titanlite.launch.ranks.Ranks.run", wrong)
    signal.signal(signal.SIGALRM, wrong)
    signal.alarm(60)
    yield tmp_path
    signal.alarm(0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.command[:50]} {case.named[:30]}")
def test_a_wrong_input_is_an_error_that_names_it(case, folder, monkeypatch, capsys):
    if case.file:
        write_file(folder / case.file, case.content)
    options = shlex.split(case.command)
    while options and re.match(r"[A-Z_]+=", options[0]):
        monkeypatch.setenv(*options.pop(0).split("=", 1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    started = time.process_time()
    code = cli.main(options)
    used = time.process_time() - started
    out, err = capsys.readouterr()

    assert not re.search("Traceback|typing|NoneType|[│─]", out + err)
    assert case.named in out + err
    assert code == case.code
    assert used < 5
    assert {path: path.read_bytes() for path in before if path.is_file()} == before
    assert not (folder / "outputs").exists()


def test_a_setting_that_generate_does_not_have_is_named():
    with pytest.raises(UserError, match="topk"):
        Generation.model_validate({"topk": 1})
