"""Wrong inputs of every kind: each is answered in words with a documented exit code, at once, and nothing is lost.

A row of a table is a name, a command line (as a shell would read it), and what the answer must hold: words separated by
" | ". Each starts in a folder of its own with a sound job file, text, tokenizer and run, to which a row adds files.
"""

import base64
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands.test_generate import save_run

from titanlite import cli
from titanlite.config.load import PACKAGE
from titanlite.data.tokenizer import load_tokenizer

TOKENIZER = PACKAGE / "assets/tokenizer/tokenizer.model"
JOB = "[training]\nsteps = 10\nseq_len = 64\n"
TEXT = "".join(json.dumps({"text": f"document {i}: " + "some words to learn from. " * 20}) + "\n" for i in range(50))
ROWS = "--dataset.source jsonl --dataset.path"
JSONL = f"data show {ROWS}"
SMALL = "--training.seq_len 64 --training.steps 10"


@dataclass(frozen=True)
class Case:
    name: str
    command: str
    said: str
    files: dict[str, str | bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    code: int = 2


def job(name: str, text: str, said: str, options: str = "") -> Case:
    """A job file and what `check` says about it."""
    return Case(f"job: {name}", f"check --job.config_file bad.toml {options}", said, {"bad.toml": text})


def ranks_file(lines: list[tuple[bytes, object]]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in lines)


BYTES: list[tuple[bytes, object]] = [(bytes([byte]), byte) for byte in range(256)]

JOB_FILES = [
    job("not TOML", "steps : 5", "bad.toml: not valid TOML | line 1"),
    job("a table that is not closed", "[training\nsteps = 5", "not valid TOML"),
    job("a text that is not closed", '[job]\ndescription = "abc', "not valid TOML"),
    job("a key twice", "[training]\nsteps = 1\nsteps = 2", "not valid TOML"),
    job("a table twice", "[training]\nsteps = 1\n[training]\nseq_len = 2", "not valid TOML"),
    job("JSON", '{"training": {"steps": 5}}', "not valid TOML"),
    job("YAML", "training:\n  steps: 5\n", "not valid TOML"),
    job("Python", "training = dict(steps=5)", "not valid TOML"),
    Case("job: UTF-16", "check --job.config_file bad.toml", "UTF-8", {"bad.toml": JOB.encode("utf-16")}),
    Case("job: Latin-1", "check --job.config_file bad.toml", "UTF-8", {"bad.toml": b'[job]\ndescription = "\xe9"'}),
    Case("job: NUL bytes", "check --job.config_file bad.toml", "not valid TOML", {"bad.toml": b"\0" * 100}),
    job("lists 2,000 deep", "[training]\nsteps = " + "[" * 2000 + "]" * 2000, "bad.toml"),
    job("a number of 5,000 digits", "[training]\nsteps = " + "9" * 5000, "bad.toml"),
    job("an unknown section", "[trainig]\nsteps = 5", "[trainig] | did you mean [training]?"),
    job("a section far from all", "[xyzzy]\na = 1", "[xyzzy] | sections are job, model"),
    job("an unknown key", "[training]\nstep = 5", "training.step = 5 | did you mean training.steps?"),
    job("a key of another section", "[training]\nlr = 1.0", "did you mean optimizer.lr?"),
    job("a key without a section", "steps = 5", "steps = 5 | did you mean training.steps?"),
    job("a section that is a number", "training = 5", "must be a table: write [training]"),
    job("a section that is a list", "[[training]]\nsteps = 5", "must be a table"),
    job("a text for a number", '[training]\nsteps = "5"', 'training.steps = "5" | a whole number'),
    job("a fraction for a whole number", "[training]\nsteps = 5.5", "training.steps = 5.5 | a whole number"),
    job("a number for a text", "[job]\ndescription = 5", "job.description = 5 | a text"),
    job("true for a number", "[training]\nsteps = true", "training.steps = true | a whole number"),
    job("a text for true", '[compile]\nenable = "yes"', 'compile.enable = "yes" | true or false'),
    job("1 for true", "[compile]\nenable = 1", "compile.enable = 1 | true or false"),
    job("a date", "[training]\nsteps = 2024-01-01", 'training.steps = "2024-01-01" | a whole number'),
    job("zero steps", "[training]\nsteps = 0", "training.steps = 0 | greater than 0"),
    job("negative steps", "[training]\nsteps = -5", "training.steps = -5"),
    job("too many steps", "[training]\nsteps = 10_000_000_000", "at most 1000000000"),
    job("nan", "[optimizer]\nlr = nan", "optimizer.lr = nan | a number greater than 0"),
    job("infinity", "[optimizer]\nlr = inf", "optimizer.lr = inf"),
    job("a rate of 0", "[optimizer]\nlr = 0.0", "optimizer.lr = 0.0 | greater than 0"),
    job("beta2 of 1", "[optimizer]\nbeta2 = 1.0", "optimizer.beta2 = 1.0 | less than 1"),
    job("a choice that is none", '[optimizer]\nname = "SGD"', 'optimizer.name = "SGD" | "AdamW"'),
    job("a wrong word in a list", '[compile]\ncomponents = ["modle"]', 'compile.components.0 = "modle"'),
    job("a text for a list", '[compile]\ncomponents = "model"', "compile.components | a list"),
    job("a wrong table in a list", "[[dataset.sources]]\nsorce = 1", "dataset.sources.0.sorce | did you mean source?"),
    job("a stage without weights", "[[dataset.stages]]\nstart_step = 1", "dataset.stages.0.weights | is missing"),
    job("stages without sources", "[[dataset.stages]]\nstart_step = 1\nweights = [1.0]", "must have 0 weights"),
    job(
        "weights of 0", '[[dataset.sources]]\nsource = "c4"\nweight = 0.0', "at least one source needs a weight above 0"
    ),
    job("keys beside a mix", '[dataset]\nsplit = "x"\n[[dataset.sources]]\nsource = "c4"', "not used beside"),
    job("a dropped key with a value", "[validation]\nprefetch = 5", "no longer a key, because nothing read it"),
    job("control characters", '[job]\ndescripton = "\\u001b[2J"', "\\u001b[2J | did you mean job.description?"),
    job("an unknown flavor", '[model]\nflavor = "7b"', 'model.flavor = "7b" | must be one of debugmodel'),
    job("heads that do not divide", "[model]\nn_heads = 7", "model.n_heads = 7 | must divide model.dim = 256"),
    job("a model of no width", "[model]\ndim = 0", "model.dim = 0 | greater than 0"),
    job("a row longer than the model", "[training]\nseq_len = 9000", "at most model.max_seq_len = 8192"),
    job("holdout without freq", "[validation]\nholdout = 0.1", "validation.freq is left out"),
    job("freq without data", "[validation]\nfreq = 5", "validation.holdout = 0.01"),
    job("all documents held out", "[validation]\nfreq = 5\nholdout = 1.0", "less than 1"),
    job("source without path", '[dataset]\nsource = "jsonl"', "bad.toml: dataset.source | dataset.path is missing"),
    job("path without source", '[dataset]\npath = "text.jsonl"', "path is not used by this source"),
    job(
        "warmup longer than the run",
        "[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 9",
        "at most training.steps",
    ),
    job("three mistakes", "[training]\nsteps = 0\nseq_len = 0\n[optimizer]\nlr = 0.0", "3 mistakes in the job"),
    job("a budget without the compiler", '[activation_checkpoint]\nmode = "memory_budget"', "compile.enable = true"),
    job("a path with NUL", '[job]\ndump_folder = "a\\u0000b"', "job.dump_folder"),
    job("a name of 300 characters", f'[job]\ndump_folder = "{"x" * 300}"', "job.dump_folder | too long"),
    job("the name of the file too long", f'[job]\nconfig_file = "{"x" * 300}"', "job.config_file | too long"),
    job("a checkpoint folder with a suffix", '[checkpoint]\nfolder = "a.json"', "is the name of a file"),
    Case("job: a folder", "check --job.config_file folder", "no such file", {"folder/x": ""}),
    Case("job: not there", "check --job.config_file nowhere.toml", 'job.config_file = "nowhere.toml" | Known there'),
    Case("job: a binary file", "check --job.config_file bad.toml", "bad.toml", {"bad.toml": bytes(range(256)) * 9}),
    job(
        "a comment only with a bom key",
        "\ufeff[training]\nstepz = 5",
        "training.stepz = 5 | did you mean training.steps?",
    ),
    job("dotted keys", "training.stepz = 5", "did you mean training.steps?"),
    job("an inline table", "training = { steps = -1 }", "training.steps = -1"),
    job("an upper-case section", "[Training]\nsteps = 5", "did you mean [training]?"),
    job("an upper-case key", "[training]\nSteps = 5", "did you mean training.steps?"),
    job("a hyphen in a key", "[training]\nseq-len = 5", "did you mean training.seq_len?"),
    job("a key of torchtitan's", "[training]\nbatch_size = 8", "training.batch_size = 8 | did you mean"),
    job("torchtitan's comm section", "[experimental]\nenable = true", "[experimental] | unknown section"),
    job("a nested table", "[training.steps]\nvalue = 5", "training.steps = | a whole number"),
    job("a list for a number", "[training]\nsteps = [5]", "training.steps = [5] | a whole number"),
    job("an empty text for a path", '[tokenizer]\npath = ""', "tokenizer.path"),
    job("a path of dots", '[tokenizer]\npath = ".."', "is a folder"),
    job("minus two for automatic", "[parallelism]\ndata_parallel_shard_degree = -2", "at least 1, or -1 for automatic"),
    job("a batch of zero", "[training]\nglobal_batch_size = 0", "at least 1, or -1 for automatic"),
    job("a ratio above one", "[lr_scheduler]\ndecay_ratio = 1.5", "lr_scheduler.decay_ratio = 1.5 | at most 1"),
    job("a seed too large", "[training]\nseed = 9223372036854775808", "training.seed = 9223372036854775808"),
    job("a seed below zero", "[training]\nseed = -1", "training.seed = -1 | at least 0"),
    job("kv heads that do not divide", "[model]\nn_heads = 4\nn_kv_heads = 3", "model.n_kv_heads = 3"),
    job("more kv heads than heads", "[model]\nn_heads = 4\nn_kv_heads = 8", "model.n_kv_heads = 8"),
    job("an odd head", "[model]\ndim = 12\nn_heads = 4\nn_kv_heads = 4", "even"),
    job("a flavor as a number", "[model]\nflavor = 8", "model.flavor = 8 | a text"),
    job("tied as a text", '[model]\ntied_embeddings = "true"', "true or false"),
    job("a rope below one", "[model]\nrope_scaling_factor = 0.5", "at least 1"),
    job(
        "rope frequencies the wrong way",
        "[model]\nrope_scaling_factor = 8.0\nrope_low_freq_factor = 4.0\nrope_high_freq_factor = 1.0",
        "rope",
    ),
    job(
        "float8 all-gather rowwise",
        '[float8]\nenable = true\nrecipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true',
        "float8",
    ),
    job(
        "precompute without the all-gather",
        "[float8]\nenable = true\nprecompute_float8_dynamic_scale_for_fsdp = true",
        "enable_fsdp_float8_all_gather",
    ),
    job("float8 of nothing", '[float8]\nrecipe_name = "mxfp8"', "float8.recipe_name"),
    job(
        "ac option 0", '[activation_checkpoint]\nselective_ac_option = "0"', "activation_checkpoint.selective_ac_option"
    ),
    job(
        "ac option as a number",
        "[activation_checkpoint]\nselective_ac_option = 2",
        "activation_checkpoint.selective_ac_option = 2",
    ),
    job(
        "moments in bfloat16 with beta2 0.999",
        '[optimizer]\nbeta2 = 0.999\nstate_dtype = "bfloat16"',
        "stochastic_rounding",
    ),
    job("stochastic rounding of float32", "[optimizer]\nstochastic_rounding = true", "stochastic_rounding"),
    job("fp16", '[training]\nmixed_precision_param = "float16"', "mixed_precision_param | bfloat16"),
    job("bf16 in short", '[training]\ndtype = "bf16"', 'training.dtype = "bf16" | "bfloat16"'),
    job(
        "split points without a pipeline",
        '[parallelism]\npipeline_parallel_split_points = ["layers.2"]',
        "split_points",
    ),
    job("a schedule that is none", '[parallelism]\npipeline_parallel_schedule = "1f1b"', "1F1B"),
    job(
        "pipeline deeper than the model",
        "[parallelism]\npipeline_parallel_degree = 8\n[training]\nlocal_batch_size = 1\nglobal_batch_size=8",
        "pipeline_parallel_degree",
        "--world-size 8",
    ),
    job(
        "tensor parallel that does not divide the heads",
        "[parallelism]\ntensor_parallel_degree = 3",
        "tensor_parallel_degree",
        "--world-size 3",
    ),
    job(
        "context parallel of odd rows",
        "[parallelism]\ncontext_parallel_degree = 2\n[training]\nseq_len = 63",
        "context_parallel",
        "--world-size 2",
    ),
    job(
        "async tensor parallel on a CPU",
        "[parallelism]\nenable_async_tensor_parallel = true",
        "enable_async_tensor_parallel",
    ),
    job("an interval of zero", "[checkpoint]\ninterval = 0", "greater than 0"),
    job("a step to go back to below -1", "[checkpoint]\nload_step = -2", "at least -1"),
    job("export dtype int8", '[checkpoint]\nexport_dtype = "int8"', "export_dtype"),
    job(
        "hf without a path", "[checkpoint]\ninitial_load_in_hf = true", "initial_load_in_hf = true | Set both, or none"
    ),
    job("an absolute checkpoint folder", '[checkpoint]\nfolder = "/etc/passwd"', "checkpoint.folder"),
    job("a checkpoint folder of a name that the run writes", '[checkpoint]\nfolder = "tb"', "other outputs"),
    job("an empty checkpoint folder", '[checkpoint]\nfolder = ""', "other outputs"),
    job("log_freq 0", "[metrics]\nlog_freq = 0", "metrics.log_freq = 0"),
    job("writers", '[metrics]\nwriters = ["none_such"]', "metrics.writers"),
    job("a timeout of zero", "[comm]\ninit_timeout_seconds = 0", "comm.init_timeout_seconds"),
    job(
        "a stage after the end",
        '[training]\nsteps=10\n[[dataset.sources]]\nsource="jsonl"\npath="text.jsonl"\n'
        "[[dataset.stages]]\nstart_step = 50\nweights=[1.0]",
        "stages",
    ),
    job("a source of a mix without a path", '[[dataset.sources]]\nsource="jsonl"', "path"),
    job(
        "a weight below zero",
        '[[dataset.sources]]\nsource="c4"\nweight=-1.0',
        "dataset.sources.0.weight = -1.0 | at least 0",
    ),
    job("threads below zero", "[training]\nnum_threads = -1", "num_threads"),
    job("a clip of nan", "[training]\nmax_norm = nan", "training.max_norm = nan"),
    job("compile of everything", '[compile]\nenable = true\ncomponents = ["all"]', 'compile.components.0 = "all"'),
    job("a list of numbers for names", "[float8]\nfilter_fqns = [1, 2]", "float8.filter_fqns.0 = 1"),
    job(
        "validation source without freq",
        '[validation]\nsource = "jsonl"\npath = "text.jsonl"',
        "validation.freq is left out",
    ),
    job(
        "both holdout and a source",
        '[validation]\nfreq = 5\nholdout = 0.1\nsource = "jsonl"\npath = "text.jsonl"',
        "holdout",
    ),
    job(
        "a validation path that is not there",
        '[validation]\nfreq = 5\nsource = "jsonl"\npath = "nowhere.jsonl"',
        "nowhere.jsonl",
    ),
]

COMMAND_LINES = [
    Case("line: nothing", "", "usage: titanlite COMMAND"),
    Case("line: an unknown command", "trane", "Did you mean `titanlite train`?"),
    Case("line: a job file as a command", "job.toml", "titanlite train --job.config_file job.toml"),
    Case("line: an option as a command", "--training.steps 5", "The command comes first"),
    Case("line: help on nothing", "help nothing_at_all", "no section or key"),
    Case("line: help on a mistyped key", "help training.stepps", "titanlite help training.steps"),
    Case("line: --config", "train --config job.toml", "--config | did you mean --job.config_file?"),
    Case("line: --config=", "check --config=job.toml", "did you mean --job.config_file?"),
    Case("line: a file without an option", "train job.toml", "did you mean --job.config_file job.toml?"),
    Case("line: a name without an option", "check llama_8b", "did you mean --job.config_file llama_8b?"),
    Case("line: an unknown option", "train --training.stpes 5", "did you mean training.steps?"),
    Case("line: torch's name for it", "check --learning-rate 5", "--learning-rate"),
    Case("line: no section", "check --steps 5", "did you mean training.steps?"),
    Case("line: one dash", "check -training.steps 5", "-training.steps"),
    Case("line: key=value", "check training.steps=5", "--training.steps 100"),
    Case("line: no value", "check --training.steps", "--training.steps (no value)"),
    Case("line: an empty value", "check --training.steps=", 'training.steps = ""'),
    Case("line: two values", "check --training.steps 5 6", "6 | expected an option"),
    Case("line: a fraction", "check --training.steps 5.0", 'training.steps = "5.0"'),
    Case("line: a word", "check --optimizer.lr high", 'optimizer.lr = "high" | a number'),
    Case("line: nan", "check --optimizer.lr nan", "optimizer.lr = nan"),
    Case("line: other digits", "check --training.steps \u0967\u0968x", "training.steps"),
    Case("line: a flag with a value", "check --compile.enable true", "takes no value"),
    Case("line: no- of a number", "check --training.no-steps", "--training.no-steps"),
    Case("line: a table", "check --dataset.sources x", "write [[dataset.sources]] in the job file"),
    Case("line: a dropped key", "check --validation.prefetch 3", "no longer a key"),
    Case("line: no such choice", "check --dataset.source csv", 'dataset.source = "csv" | "jsonl"'),
    Case("line: no ranks", "check --world-size 0", "--world-size 0 | greater than 0"),
    Case("line: ranks without end", "check --world-size 1000000000000", "--world-size 1000000000000 | at most 1000000"),
    Case("line: ranks in words", "check --world-size four", "--world-size"),
    Case("line: a mistyped option of the command", "check --world-sise 4", "did you mean --world-size?"),
    Case("line: batch for other ranks", "check --world-size 3 --training.global_batch_size 8", "must be a multiple"),
    Case("line: degrees for other ranks", "check --world-size 4 --parallelism.tensor_parallel_degree 3", "4 ranks"),
    Case("line: prepare without out", "prepare", "--out PATH"),
    Case("line: prepare with no workers", "prepare --out x --workers 0", "--workers 0 | greater than 0"),
    Case("line: data alone", "data", "titanlite data show --step N"),
    Case("line: data list", "data list", "`titanlite data list` is unknown"),
    Case("line: step 0", "data show --step 0", "--step 0 | greater than 0"),
    Case("line: a step after the last", f"data show --step 11 {SMALL}", "--step 11: the run has the steps 1 to 10"),
    Case("line: a row after the last", f"data show --row 99 {SMALL}", "--row 99 | 0 to 7"),
    Case("line: generate from nothing", "generate --prompt x", "--checkpoint PATH"),
    Case(
        "line: a temperature below 0", "generate --checkpoint run --temperature -1", "--temperature -1.0 | at least 0"
    ),
    Case("line: an endless temperature", "generate --checkpoint run --temperature inf", "--temperature"),
    Case("line: no tokens", "generate --checkpoint run --max-new-tokens 0", "--max-new-tokens 0 | greater than 0"),
    Case("line: a seed below 0", "generate --checkpoint run --seed -1", "--seed -1 | at least 0"),
    Case("line: an unknown option of generate", "generate --checkpoint run --topk 3", "--top-k"),
    Case("line: export without out", "export --checkpoint run", "--out PATH"),
    Case("line: export as int8", "export --checkpoint run --out x --dtype int8", "float32 | bfloat16"),
    Case("line: import of nothing", "import --out x", "--hf | --meta"),
    Case("line: import of both", "import --out x --hf a --meta b", "--hf | --meta"),
    Case("line: tokenizer alone", "tokenizer", "titanlite tokenizer train"),
    Case("line: tokenizer without out", "tokenizer train --data text.jsonl", "--out"),
    Case("line: a tokenizer of 5 tokens", "tokenizer train --data text.jsonl --vocab-size 5 --out x", "--vocab-size 5"),
    Case("line: verify nothing", "verify", "PATH"),
    Case("line: verify two", "verify run other", "other"),
    Case("line: help on a command that is none", "help chekc", "check"),
    Case("line: train --help of nothing", "train --help nothing_such", "no section or key"),
    Case("line: a command in capitals", "TRAIN", "Did you mean `titanlite train`?"),
    Case("line: an empty command", "''", "unknown command"),
    Case(
        "line: the config file twice, the second wrong",
        "check --job.config_file job.toml --job.config_file nowhere",
        "nowhere",
    ),
    Case("line: a config file without a value", "check --job.config_file", "--job.config_file (no value)"),
    Case("line: a dash alone", "check -", "expected an option"),
    Case("line: a value with spaces", "check --training.steps '1 0'", "training.steps"),
    Case("line: thousands", "check --training.steps 1,000", 'training.steps = "1,000"'),
    Case("line: a k", "check --training.steps 10k", 'training.steps = "10k"'),
    Case("line: hex", "check --training.steps 0x10", "training.steps"),
    Case("line: a huge number", "check --training.steps " + "9" * 5000, "training.steps"),
    Case("line: infinity", "check --training.max_norm inf", "training.max_norm"),
    Case("line: a flag with =", "check --compile.enable=true", "takes no value"),
    Case("line: no-flag with a value", "check --checkpoint.no-enable false", "takes no value"),
    Case("line: two no", "check --checkpoint.no-no-enable", "--checkpoint.no-no-enable"),
    Case("line: an emoji", "check --training.steps \U0001f600", "training.steps"),
    Case("line: not UTF-8", "check --job.description '\udcff'", "job.description"),
    Case("line: json to check", "check --json", "--json"),
    Case("line: verify with an option that is none", "verify run --deep", "--deep"),
    Case("line: verify with json of nothing", "verify --json", "PATH"),
    Case("line: a temperature in words", "generate --checkpoint run --temperature hot", "--temperature"),
    Case("line: export of two", "export --checkpoint run hurt --out x", "hurt"),
    Case(
        "line: tokenizer with a size too large",
        "tokenizer train --data text.jsonl --vocab-size 99999999 --out x",
        "--vocab-size 99999999",
    ),
    Case(
        "line: tokenizer of more than the text gives",
        "tokenizer train --data text.jsonl --vocab-size 100000 --out x",
        "vocabulary",
    ),
    Case(
        "line: tokenizer of a column that is not there",
        "tokenizer train --data text.jsonl --text-column body --vocab-size 600 --out x",
        "There is no text to train on | no field 'body'",
    ),
    Case("line: tokenizer of a folder", "tokenizer train --data run --vocab-size 600 --out x", "run"),
    Case(
        "line: tokenizer of bytes a day",
        "tokenizer train --data text.jsonl --vocab-size 600 --out x --max-bytes 0",
        "--max-bytes 0",
    ),
    Case("line: tokenizer into /proc", "tokenizer train --data text.jsonl --vocab-size 600 --out /proc/x", "/proc"),
    Case(
        "line: tokenizer over a file", "tokenizer train --data text.jsonl --vocab-size 600 --out job.toml", "job.toml"
    ),
    Case("line: prepare into the folder of the text", f"prepare --out . --workers 1 {ROWS} text.jsonl", "is not empty"),
    Case("line: prepare of shards", "prepare --out x --workers 1 --dataset.source shards --dataset.path run", "run"),
    Case("line: data show of a rank", f"{JSONL} text.jsonl {SMALL} --rank 5", "--rank"),
    Case("line: data show with a negative row", f"{JSONL} text.jsonl {SMALL} --row -1", "--row"),
    Case("line: a plan for too many ranks", "plan --world-size 1000000000000", "--world-size 1000000000000 | at most"),
    Case("line: a plan for a boundless memory", "plan --memory 1e300", "--memory 1e+300 | at most"),
    Case(
        "line: a plan of endless rows",
        "plan --training.local_batch_size 1000000000000",
        "local_batch_size = 1000000000000 | at most",
    ),
    Case("line: a plan for a million shards", "plan --world-size 1000000", "1,000,000 ranks shard | at most"),
    Case("line: a search over a file", "plan --search --write job.toml", "--write job.toml | exists already"),
    Case(
        "line: a device of a boundless memory",
        "plan --gpu gpu.toml",
        "memory_gib",
        {
            "gpu.toml": 'name = "x"\nmachine = 8\n'
            + "".join(
                f"{key} = 1e300\n" for key in ("memory_gib", "bf16", "fp32", "bandwidth", "link", "network", "host")
            )
        },
    ),
    Case("line: a look in an age", "watch run --interval 1e300", "--interval 1e+300 | at most"),
    Case("line: a page over a file", "report run --out job.toml", "--out job.toml | no page"),
    Case("line: a page into a pipe", "report run --out pipe", "pipe is a pipe"),
    Case("line: import over a run", "import --hf nowhere --out run", "nowhere"),
]

ENVIRONMENTS = [
    Case("env: WORLD_SIZE in words", "check", 'WORLD_SIZE "two"', env={"WORLD_SIZE": "two"}),
    Case("env: WORLD_SIZE 0", "train", 'WORLD_SIZE "0"', env={"WORLD_SIZE": "0"}),
    Case("env: WORLD_SIZE in other digits", "check", "WORLD_SIZE", env={"WORLD_SIZE": "²"}),
    Case("env: WORLD_SIZE without end", "check", "at most 1000000", env={"WORLD_SIZE": "1000000000000"}),
    Case("env: RANK of thousands of digits", "check", "RANK", env={"RANK": "9" * 5000}),
    Case("env: NGPU in words", "launch", "NGPU=all | a whole number", env={"NGPU": "all"}),
    Case("env: NGPU 0", "launch", "NGPU=0 | at least 1", env={"NGPU": "0"}),
    Case("env: NGPU below 0", "launch", "NGPU=-2", env={"NGPU": "-2"}),
    Case("env: NNODES in words", "launch", "NNODES=many", env={"NNODES": "many"}),
    Case("env: NNODES falling", "launch", "NNODES=2:1", env={"NNODES": "2:1"}),
    Case("env: NNODES alone", "launch", "NNODES=2 needs MASTER_ADDR", env={"NNODES": "2"}),
    Case(
        "env: NODE_RANK too large",
        "launch",
        "NODE_RANK=2 must be less than NNODES=2",
        env={"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "localhost"},
    ),
    Case(
        "env: MASTER_PORT in words",
        "launch",
        "MASTER_PORT=http",
        env={"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"},
    ),
    Case("env: MAX_RESTARTS in words", "launch", "MAX_RESTARTS=often", env={"MAX_RESTARTS": "often"}),
    Case("env: LOG_RANK in words", "launch", "LOG_RANK", env={"LOG_RANK": "first"}),
    Case("env: NGPU that nobody has", "launch", "NGPU=999999999999", env={"NGPU": "999999999999"}),
    Case("env: LOG_RANK of no rank", "launch", "LOG_RANK", env={"LOG_RANK": "7"}),
    Case(
        "env: MASTER_PORT too large",
        "launch",
        "MASTER_PORT=99999",
        env={"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
    ),
    Case(
        "env: MASTER_ADDR with a semicolon",
        "launch",
        "MASTER_ADDR",
        env={"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost;reboot"},
    ),
    Case("env: a wrong job", "launch --training.steps 0", "training.steps = 0"),
    Case(
        "env: MASTER_PORT 0",
        "launch",
        "MASTER_PORT=0",
        env={"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
    ),
    Case(
        "env: NODE_RANK in words",
        "launch",
        "NODE_RANK=first",
        env={"NNODES": "2", "NODE_RANK": "first", "MASTER_ADDR": "localhost"},
    ),
    Case(
        "env: NODE_RANK below 0",
        "launch",
        "NODE_RANK=-1",
        env={"NNODES": "2", "NODE_RANK": "-1", "MASTER_ADDR": "localhost"},
    ),
    Case("env: NNODES 0", "launch", "NNODES=0", env={"NNODES": "0"}),
    Case("env: NGPU with a fraction", "launch", "NGPU=1.5", env={"NGPU": "1.5"}),
    Case("env: LOG_RANK below 0", "train", "LOG_RANK", env={"LOG_RANK": "-1"}),
    Case("env: WORLD_SIZE negative", "train", "WORLD_SIZE", env={"WORLD_SIZE": "-1"}),
    Case("env: RANK in words", "train", 'RANK "first"', env={"RANK": "first"}),
    Case("env: RANK beyond the world", "train", 'RANK "5" | at most 0', env={"RANK": "5"}),
    Case("env: MAX_RESTARTS below 0", "launch", "MAX_RESTARTS=-1", env={"MAX_RESTARTS": "-1"}),
]

DATA = [
    Case("data: not there", f"{JSONL} nowhere.jsonl {SMALL}", "nowhere.jsonl"),
    Case("data: a glob of nothing", f"{JSONL} '*.nothing' {SMALL}", "matches no file"),
    Case("data: a folder", f"{JSONL} run {SMALL}", "is a folder"),
    Case("data: empty", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": ""}),
    Case("data: empty lines", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": "\n\n\n"}),
    Case("data: not JSON", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": "hello\n" * 50}),
    Case("data: a JSON array", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": '[{"text": "a"}]'}),
    Case("data: no text in it", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl | text", {"bad.jsonl": '{"body": "a"}\n' * 9}),
    Case("data: text that is a number", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": '{"text": 5}\n' * 9}),
    Case("data: empty documents", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": '{"text": ""}\n' * 9}),
    Case("data: not UTF-8", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": b'{"text": "\xff\xfe"}\n' * 50}),
    Case(
        "data: less than a row", f"{JSONL} bad.jsonl {SMALL}", "fewer than one sequence", {"bad.jsonl": '{"text": "a"}'}
    ),
    Case(
        "data: gzip that is none",
        f"prepare --out x --workers 1 {ROWS} bad.jsonl.gz",
        "bad.jsonl.gz",
        {"bad.jsonl.gz": "no"},
    ),
    Case(
        "data: gzip cut short",
        f"prepare --out x --workers 1 {ROWS} bad.jsonl.gz",
        "bad.jsonl.gz",
        {"bad.jsonl.gz": gzip.compress(TEXT.encode())[:-20]},
    ),
    Case(
        "data: zstd that is none",
        f"prepare --out x --workers 1 {ROWS} bad.jsonl.zst",
        "bad.jsonl.zst",
        {"bad.jsonl.zst": "no"},
    ),
    Case(
        "data: parquet that is none",
        f"data show --dataset.source parquet --dataset.path bad.parquet {SMALL}",
        "bad.parquet",
        {"bad.parquet": "no"},
    ),
    Case("data: arrow that is none", f"data show --dataset.source arrow --dataset.path run {SMALL}", "run"),
    Case(
        "data: shards that are none", f"check --dataset.source shards --dataset.path run {SMALL}", "titanlite prepare"
    ),
    Case(
        "data: shards with a broken manifest",
        f"data show --dataset.source shards --dataset.path bad {SMALL}",
        "bad",
        {"bad/manifest.json": "{"},
    ),
    Case(
        "data: shards with an empty manifest",
        f"data show --dataset.source shards --dataset.path bad {SMALL}",
        "bad",
        {"bad/manifest.json": "{}"},
    ),
    Case("data: prepare into a full folder", f"prepare --out run --workers 1 {ROWS} text.jsonl", "run is not empty"),
    Case("data: prepare into a file", f"prepare --out text.jsonl --workers 1 {ROWS} text.jsonl", "text.jsonl"),
    Case("data: prepare under a file", f"prepare --out text.jsonl/x --workers 1 {ROWS} text.jsonl", "text.jsonl"),
    Case(
        "data: prepare into a checkpoint",
        f"prepare --out run/checkpoint/step-00000010/x --workers 1 {ROWS} text.jsonl",
        "step-00000010 is a checkpoint",
    ),
    Case("data: prepare into /proc", f"prepare --out /proc/x --workers 1 {ROWS} text.jsonl", "/proc/x"),
    Case(
        "data: prepare a bad record",
        f"prepare --out x --workers 1 {ROWS} bad.jsonl",
        "bad.jsonl",
        {"bad.jsonl": TEXT + "no\n"},
    ),
    Case("data: a column that is not there", f"{JSONL} text.jsonl --dataset.text_column body {SMALL}", "body"),
    Case(
        "data: a hub id that is a path",
        f"data show --dataset.source huggingface --dataset.path ./nowhere {SMALL}",
        "nowhere",
    ),
    Case("data: a JSON text a line", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": '"hello"\n' * 50}),
    Case("data: a JSON null", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": '{"text": null}\n' * 50}),
    Case(
        "data: a list of texts", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": '{"text": ["a","b"]}\n' * 50}
    ),
    Case(
        "data: pretty-printed JSON",
        f"{JSONL} bad.jsonl {SMALL}",
        "bad.jsonl",
        {"bad.jsonl": json.dumps([{"text": "a"}] * 9, indent=2)},
    ),
    Case(
        "data: pretty-printed object",
        f"{JSONL} bad.jsonl {SMALL}",
        "bad.jsonl",
        {"bad.jsonl": json.dumps({"text": "a " * 500}, indent=2)},
    ),
    Case("data: CSV", f"{JSONL} bad.csv {SMALL}", "bad.csv", {"bad.csv": "id,text\n1,hello\n" * 20}),
    Case("data: UTF-16", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": TEXT.encode("utf-16")}),
    Case(
        "data: nested 100,000 deep",
        f"{JSONL} bad.jsonl {SMALL}",
        "bad.jsonl",
        {"bad.jsonl": ("[" * 100000 + "]" * 100000 + "\n") * 2},
    ),
    Case(
        "data: a text file that is binary",
        f"data show --dataset.source text --dataset.path bad.txt {SMALL}",
        "bad.txt",
        {"bad.txt": bytes(range(256)) * 20},
    ),
    Case("data: zip", f"{JSONL} bad.jsonl {SMALL}", "bad.jsonl", {"bad.jsonl": b"PK\x03\x04" + bytes(range(256)) * 9}),
    Case("data: gzip that is plain", f"{JSONL} bad.jsonl.gz {SMALL}", "bad.jsonl.gz", {"bad.jsonl.gz": TEXT}),
    Case(
        "data: a pattern without files in a folder",
        f"{JSONL} 'run/*.jsonl' {SMALL} --dataset.text_column nowhere",
        "run",
    ),
    Case("data: a link to nowhere", f"{JSONL} dangling {SMALL}", "dangling"),
    Case(
        "data: an arrow folder with a broken state",
        f"data show --dataset.source arrow --dataset.path bad {SMALL}",
        "bad",
        {"bad/state.json": "{", "bad/dataset_info.json": "{}"},
    ),
    Case("data: the device /dev/null", f"{JSONL} /dev/null {SMALL}", "/dev/null"),
]


def with_tokenizer(name: str, content: str | bytes, said: str, suffix: str = "model") -> Case:
    path = f"bad.{suffix}"
    return Case(f"tokenizer: {name}", f"check --tokenizer.path {path}", f"{path} | {said}", {path: content})


def vocabulary(**model: object) -> str:
    return json.dumps({"model": {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": [], **model}})


TOKENIZERS = [
    Case("tokenizer: not there", "check --tokenizer.path nowhere.model", "there is no such file"),
    Case("tokenizer: a folder", "check --tokenizer.path run", "is a folder"),
    with_tokenizer("empty", "", "the file is empty"),
    with_tokenizer("binary, as SentencePiece", b"\n\x0e\n\x05<unk>\x15\0\0\0\0", "SentencePiece"),
    with_tokenizer("no base64", "???? 0\n", "line 1"),
    with_tokenizer("no rank", "YQ==\n", "line 1"),
    with_tokenizer("rank in words", "YQ== one\n", "line 1"),
    with_tokenizer("negative ranks", ranks_file([(t, int(str(r)) - 9) for t, r in BYTES]), "rank"),
    with_tokenizer("ranks twice", ranks_file([*BYTES, (b"ab", 5)]), "rank"),
    with_tokenizer("a huge rank", ranks_file([*BYTES, (b"ab", 10**12)]), "rank"),
    with_tokenizer("no bytes", ranks_file([(b"ab", 0), (b"cd", 1)]), "byte"),
    with_tokenizer("JSON that is none", "{", "not valid JSON", "json"),
    with_tokenizer("JSON of something else", '{"a": 1}', "model is missing", "json"),
    with_tokenizer("a JSON list", "[]", "expected an object", "json"),
    with_tokenizer("an empty vocabulary", vocabulary(vocab={}), "no token that ends documents", "json"),
    with_tokenizer("no end token", vocabulary(vocab={"a": 0}), "no token that ends documents", "json"),
    with_tokenizer("ids that are texts", vocabulary(vocab={"</s>": "0"}), "bad.json", "json"),
    with_tokenizer("nested 100,000 deep", "[" * 100_000, "bad.json", "json"),
    Case(
        "tokenizer: larger than the model",
        "check --model.vocab_size 100",
        "model.vocab_size = 100 | at least 4096, the vocabulary of",
    ),
    with_tokenizer("one line without end", "YQ== 0", "byte"),
    with_tokenizer("a gap in ranks", ranks_file([*BYTES, (b"ab", 300)]), ""),
    with_tokenizer("UTF-16", "YQ== 0\n".encode("utf-16"), ""),
]

CHECKPOINTS = [
    Case("checkpoint: verify what is not there", "verify nowhere", "nowhere"),
    Case("checkpoint: verify an empty folder", "verify empty", "no checkpoint here", {"empty/x": ""}, code=4),
    Case("checkpoint: verify a file", "verify job.toml", "job.toml"),
    Case("checkpoint: verify a damaged one", "verify hurt/checkpoint/step-00000020", "damaged", code=4),
    Case("checkpoint: generate from nowhere", "generate --checkpoint nowhere", "does not exist"),
    Case("checkpoint: generate from a file", "generate --checkpoint job.toml", "is a file"),
    Case(
        "checkpoint: generate from an empty folder",
        "generate --checkpoint empty",
        "no checkpoint here",
        {"empty/x": ""},
        code=4,
    ),
    Case(
        "checkpoint: generate from a damaged one",
        "generate --checkpoint hurt/checkpoint/step-00000020",
        "damaged",
        code=4,
    ),
    Case(
        "checkpoint: a manifest that is none",
        "generate --checkpoint bad/step-00000010",
        "damaged",
        {"bad/step-00000010/manifest.json": "{"},
        code=4,
    ),
    Case(
        "checkpoint: an empty manifest",
        "generate --checkpoint bad/step-00000010",
        "damaged",
        {"bad/step-00000010/manifest.json": "{}"},
        code=4,
    ),
    Case(
        "checkpoint: a manifest of a list",
        "verify bad",
        "step-00000010",
        {"bad/step-00000010/manifest.json": "[]"},
        code=4,
    ),
    Case("checkpoint: no manifest", "verify bad", "step-00000010", {"bad/step-00000010/x": ""}, code=4),
    Case(
        "checkpoint: a prompt longer than the model",
        f"generate --checkpoint run --prompt '{'word ' * 90}'",
        "Shorten it",
    ),
    Case("checkpoint: export what is not there", "export --checkpoint nowhere --out x", "nowhere"),
    Case(
        "checkpoint: export a damaged one",
        "export --checkpoint hurt/checkpoint/step-00000020 --out x",
        "damaged",
        code=4,
    ),
    Case("checkpoint: export onto a folder", "export --checkpoint run/checkpoint --out run", "run"),
    Case("checkpoint: export onto a file", "export --checkpoint run/checkpoint --out job.toml", "job.toml"),
    Case("checkpoint: export under a file", "export --checkpoint run/checkpoint --out job.toml/x", "cannot be made"),
    Case(
        "checkpoint: export into a checkpoint",
        "export --checkpoint run/checkpoint --out run/checkpoint/step-00000010/a/b",
        "step-00000010 is a checkpoint | Name another folder",
    ),
    Case("checkpoint: export into /proc", "export --checkpoint run/checkpoint --out /proc/x", "/proc cannot be made"),
    Case(
        "checkpoint: export with no tokenizer",
        "export --checkpoint run/checkpoint --out x --tokenizer nowhere.json",
        "nowhere.json",
    ),
    Case("checkpoint: import from nowhere", "import --hf nowhere --out x", "nowhere"),
    Case("checkpoint: import from an empty folder", "import --hf empty --out x", "empty", {"empty/x": ""}),
    Case("checkpoint: import from a file", "import --hf job.toml --out x", "job.toml"),
    Case("checkpoint: import with a broken config", "import --hf bad --out x", "config.json", {"bad/config.json": "{"}),
    Case(
        "checkpoint: import with an empty config", "import --hf bad --out x", "config.json", {"bad/config.json": "{}"}
    ),
    Case(
        "checkpoint: import of another architecture",
        "import --hf bad --out x",
        "config.json",
        {"bad/config.json": '{"model_type": "gpt2"}'},
    ),
    Case("checkpoint: import Meta from nowhere", "import --meta nowhere --out x", "nowhere"),
    Case(
        "checkpoint: import Meta with broken parameters",
        "import --meta bad --out x",
        "params.json",
        {"bad/params.json": "{"},
    ),
    Case(
        "checkpoint: import Meta without weights",
        "import --meta bad --out x",
        "bad",
        {"bad/params.json": '{"dim": 8, "n_layers": 1, "n_heads": 1, "vocab_size": 9, "norm_eps": 1e-5}'},
    ),
    Case(
        "checkpoint: a step that is not there",
        "generate --checkpoint run/checkpoint/step-00000099 --prompt x",
        "step-00000099",
    ),
    Case(
        "checkpoint: a file of it",
        "generate --checkpoint run/checkpoint/step-00000020/manifest.json --prompt x",
        "is a file",
    ),
    Case("checkpoint: a name with NUL", "generate --checkpoint 'a\0b' --prompt x", "--checkpoint"),
    Case("checkpoint: a name of 300 characters", f"generate --checkpoint {'x' * 300} --prompt x", "--checkpoint"),
    Case("checkpoint: initial path a file", "train --checkpoint.initial_load_path job.toml", "job.toml"),
]

FOLDERS = [
    Case("folder: /proc", "train --job.dump_folder /proc/out", "job.dump_folder | cannot be written to"),
    Case(
        "folder: a checkpoint",
        "train --job.dump_folder run/checkpoint/step-00000010/x",
        "step-00000010 is a checkpoint",
    ),
    Case("folder: /sys", "check --job.dump_folder /sys/out", "job.dump_folder | cannot be written to"),
    Case("folder: /dev/null", "train --job.dump_folder /dev/null", "/dev/null is a file"),
    Case("folder: a file", "train --job.dump_folder job.toml", "job.toml is a file"),
    Case("folder: under a file", "train --job.dump_folder job.toml/a/b", "job.toml is a file"),
    Case("folder: a link to nowhere", "train --job.dump_folder dangling", "dangling is a file"),
    Case(
        "folder: checkpoints in /proc", "train --checkpoint.folder /proc/x", "checkpoint.folder | cannot be written to"
    ),
    Case("folder: checkpoints in a file", "train --job.dump_folder out", "checkpoint.folder", {"out/checkpoint": "x"}),
    Case("folder: events.jsonl is a folder", "train --job.dump_folder out", "events.jsonl", {"out/events.jsonl/x": ""}),
    Case("folder: train.log is a folder", "train --job.dump_folder out", "train.log", {"out/train.log/x": ""}),
    Case(
        "folder: metrics.jsonl is a folder", "train --job.dump_folder out", "metrics.jsonl", {"out/metrics.jsonl/x": ""}
    ),
    Case("folder: config.toml is a folder", "train --job.dump_folder out", "config.toml", {"out/config.toml/x": ""}),
    Case("folder: tb is a file", "train --job.dump_folder out", "tb", {"out/tb": ""}),
    Case("folder: no start from nowhere", "train --checkpoint.initial_load_path nowhere", "nowhere"),
    Case(
        "folder: environment.json is a folder",
        "train --job.dump_folder out",
        "environment.json",
        {"out/environment.json/x": ""},
    ),
    Case(
        "folder: checkpoint is a link to nowhere",
        "train --job.dump_folder hurt2 --checkpoint.folder ../dangling",
        "dangling",
    ),
]


def old_job(name: str, content: str | bytes, said: str, options: str = "") -> Case:
    """A job file of another program and what `migrate` says about it."""
    return Case(f"migrate: {name}", f"migrate old.toml {options}", said, {"old.toml": content})


MIGRATIONS = [
    Case("migrate: nothing", "migrate", "required"),
    Case("migrate: not there", "migrate nowhere.toml", "cannot read nowhere.toml"),
    Case("migrate: a folder", "migrate run", "cannot read run: Is a directory"),
    Case("migrate: a pipe", "migrate pipe", "pipe is a pipe; expected a file"),
    Case("migrate: a device", "migrate /dev/zero", "/dev/zero is a device"),
    Case("migrate: a link to nowhere", "migrate dangling", "cannot read dangling"),
    Case("migrate: onto a file that is there", "migrate job.toml --out text.jsonl", "text.jsonl exists already"),
    Case("migrate: onto itself", "migrate job.toml --out job.toml", "job.toml exists already | --overwrite"),
    Case("migrate: onto a link to nowhere", "migrate job.toml --out dangling", "dangling exists already"),
    Case("migrate: over a folder", "migrate job.toml --out run --overwrite", "run is a folder"),
    Case("migrate: over a pipe", "migrate job.toml --out pipe --overwrite", "pipe is a pipe"),
    Case("migrate: under a file", "migrate job.toml --out text.jsonl/new.toml", "text.jsonl is a file"),
    Case("migrate: into /proc", "migrate job.toml --out /proc/new.toml", "/proc"),
    Case("migrate: a version that there is not", "migrate job.toml --torchtitan-version 0.3", "0.3"),
    old_job("not TOML", "steps : 5", "old.toml: not valid TOML"),
    old_job("UTF-16", JOB.encode("utf-16"), "UTF-8"),
    old_job("Latin-1", b'[job]\ndescription = "\xe9"', "UTF-8"),
    old_job("NUL bytes", b"\0" * 100, "not valid TOML"),
    old_job("control characters", b"# \x1b[2J", "not valid TOML"),
    old_job("a file of 1 MB", b"#" * (1 << 20), "larger than"),
    old_job("lists 2,000 deep", "[training]\nsteps = " + "[" * 2000 + "]" * 2000, "not valid TOML"),
    old_job("tables 400 deep", "[" + ".".join("a" * 400) + "]\nb = 1", "old.toml: "),
    old_job("another model", '[model]\nname = "llama4"', 'model.name = "llama4" | Llamas only'),
    old_job("a wrong type", "[training]\nsteps = 5.5", "training.steps = 5.5 | a whole number"),
    old_job("escapes", '[model]\nflavor = "\\u001b[2J"', "\\u001b[2J"),
    old_job("ours", '[dataset]\nsource = "c4"', "a job file of titanlite's already"),
    job(
        "torchtitan's", '[model]\nname = "llama3"\nflavor = "8B"', "bad.toml looks like | `titanlite migrate bad.toml`"
    ),
    job("torchtitan's flavor", '[model]\nflavor = "8B"', "looks like a job file of torchtitan's | debugmodel, 150m"),
]

CASES = [*JOB_FILES, *COMMAND_LINES, *ENVIRONMENTS, *DATA, *TOKENIZERS, *CHECKPOINTS, *FOLDERS, *MIGRATIONS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that each case gets: `run`, the output of a training run, and `hurt`, one with a damaged checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run").mkdir()
    save_run(folder / "run", load_tokenizer(TOKENIZER).fingerprint, (10, 20))
    shutil.copytree(folder / "run", folder / "hurt")
    weights = next((folder / "hurt/checkpoint/step-00000020").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-8] + b"\0" * 8)
    return folder


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a case starts in."""
    for name in ("run", "hurt"):
        (tmp_path / name).mkdir()
        shutil.copytree(runs / name, tmp_path / name, dirs_exist_ok=True, copy_function=os.link)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.jsonl").write_text(TEXT)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for name in ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOG_RANK", "MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def started(*_: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr("titanlite.train.loop.train", started)
    monkeypatch.setattr("titanlite.launch.ranks.run_ranks", started)
    return tmp_path


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A case that waits for anything ends after a minute: on a busy machine, seconds pass in which it has no turn."""

    def hangs(*_: object) -> None:
        raise AssertionError("hangs")

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    yield
    signal.alarm(0)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def answer(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    words = shlex.split(command)
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out + err


def plain(text: str) -> str:
    """Without the boxes and line breaks of a terminal."""
    return re.sub(r"[\s│─╭╮╰╯]+", " ", text)


def test_each_case_has_a_name_of_its_own_and_there_are_many():
    assert len({case.name for case in CASES}) == len(CASES) >= 300


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_input_is_answered(
    case: Case, place: Path, no_hang: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, content in case.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    before, started = contents(place), time.process_time()
    code, text = answer(case.command, capsys)
    assert "Traceback" not in text
    for words in case.said.split(" | "):
        assert words in plain(text)
    assert code == case.code
    assert time.process_time() - started < 5
    after = contents(place)
    assert {path: after.get(path) for path in before} == before
