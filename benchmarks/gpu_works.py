"""The work of the GPU benchmarks, with the options of titanlite and of torchtitan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs import ROOT

# Sorted by speed. Benchmarks measure the first mode that fits into memory.
AC_MODES = (
    "none",
    "selective",
    "full",
)


@dataclass(frozen=True)
class Work:
    """Everything that titanlite and torchtitan must have in common in a comparison."""

    flavor: str = "8b"
    precision: str = "bf16"
    """Precision of the matmuls: bf16, or float8 with one scale per tensor."""
    compile: bool = True
    dtype: str = "bfloat16"
    """Dtype of parameters, gradients and optimizer state."""
    rows: int = 1
    seq_len: int = 8192
    steps: int = 20
    activation_checkpoint: str = "none"
    tiny: bool = False
    """Use a model of two small blocks instead of the flavor, for CPUs."""

    @property
    def window(self) -> int:
        """Return the steps between log lines. The first two windows are warmup."""
        return max(1, self.steps // 4)


# The most important cases come first, because the time may not suffice for all.
WORKS = {
    "8b bf16 compiled": Work(),
    "8b float8 compiled": Work(precision="float8"),
    "8b bf16 eager": Work(compile=False),
    # Untied, as torchtitan has it; 16 bytes a parameter fit, so nothing but the matmuls is in bf16.
    "1b bf16 compiled": Work("1b", dtype="float32", rows=4),
    "1b float8 compiled": Work("1b", precision="float8", dtype="float32", rows=4),
    "1b bf16 eager": Work("1b", compile=False, dtype="float32", rows=4),
}
# Beside torchtitan bf16 is stored everywhere: between fp32 weights its autocast computes norms and
# sums in fp32.
COMPARED = {name: replace(work, dtype="bfloat16") for name, work in WORKS.items() if work.compile}
COMPARED["8b, 4 rows, bf16 compiled"] = Work(
    rows=4, steps=8, activation_checkpoint="full"
)  # fills 140 GB
TINY_MODEL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "ffn_dim": 128,
    "vocab_size": 4096,
}


def titanlite_options(work: Work, folder: Path, text: Path, extra_features: bool) -> list[str]:
    """Return the command line of a job.

    Args:
        extra_features: Also use features that torchtitan lacks: stochastic rounding of bf16
            weights, and a compiled optimizer and clipping.
    """
    keys: dict[str, object] = {
        "job.dump_folder": folder,
        "tokenizer.path": ROOT / "assets/tokenizer/tokenizer.json",
        "dataset.source": "jsonl",
        "dataset.path": text / "*.jsonl",
        "model.flavor": work.flavor,
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.rows,
        "training.steps": work.steps,
        "training.dtype": work.dtype,
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.mode": work.activation_checkpoint,
        "optimizer.lr": 3e-4,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": work.window,
    }
    if work.tiny:
        keys["float8.min_features"] = 0
        for name, value in TINY_MODEL.items():
            keys[f"model.{name}"] = value

    options = []
    for key, value in keys.items():
        options += [f"--{key}", str(value)]
    options += [
        "--checkpoint.no-enable",
        "--metrics.no-enable_tensorboard",
        "--model.no-tied_embeddings",
    ]
    if work.compile:
        options += ["--compile.enable", "--compile.components", "model", "loss"]
        if extra_features:
            options += ["optimizer", "clip"]
            if work.dtype == "bfloat16":
                options.append("--optimizer.stochastic_rounding")
    if work.precision == "float8":
        # A single GPU gathers nothing, and torchtitan then disables the FP8 all-gather itself.
        options.append("--float8.enable")
    return options


def torchtitan_job(work: Work, folder: Path, text: Path) -> dict[str, Any]:
    """Return the same job for torchtitan.

    It stores all tensors in `dtype` and rounds to nearest.
    """
    job: dict[str, Any] = {
        "job": {"dump_folder": str(folder)},
        "model": {
            "name": "llama3",
            "flavor": {"8b": "8B", "1b": "1B"}[work.flavor],
            "hf_assets_path": str(ROOT / "assets/tokenizer"),
        },
        "experimental": {"custom_import": "gpu_torchtitan"},  # brings the 1B
        "optimizer": {"name": "AdamW", "lr": 3e-4, "weight_decay": 0.1, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 1},
        "training": {
            # With this name, torchtitan loads local files.
            "dataset": "c4_test",
            "dataset_path": str(text),
            "seq_len": work.seq_len,
            "local_batch_size": work.rows,
            "steps": work.steps,
            "dtype": work.dtype,
            "mixed_precision_param": "bfloat16",
        },
        # As in titanlite, recomputation stops after the last activation that the backward pass
        # needs.
        "activation_checkpoint": {
            "mode": work.activation_checkpoint,
            "selective_ac_option": "op",
            "early_stop": True,
            "preserve_rng_state": False,
        },
        "compile": {"enable": work.compile, "components": ["model", "loss"]},
        "metrics": {"log_freq": work.window, "disable_color_printing": True},
        "checkpoint": {"enable": False},
    }
    if work.precision == "float8":
        job["model"]["converters"] = ["quantize.linear.float8"]
        job["quantize"] = {"linear": {"float8": {"filter_fqns": ["output"]}}}
    return job
