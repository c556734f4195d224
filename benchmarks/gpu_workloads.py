"""Workloads of the GPU benchmarks, with their options for titanlite and for torchtitan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runs import ROOT, to_options

# Modes of activation checkpointing, sorted by speed. Benchmarks measure the first mode that fits
# into memory.
AC_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class GpuWorkload:
    """Everything that titanlite and torchtitan must have in common in a comparison.

    Attributes:
        flavor: Model.
        precision: Precision of the matmuls: bf16, or float8 with one scale per tensor.
        compile: Whether the blocks and the loss are compiled.
        dtype: Dtype of parameters, gradients and optimizer state.
        local_batch_size: Sequences per microbatch.
        seq_len: Tokens per sequence.
        steps: Number of steps.
        activation_checkpoint: Mode of activation checkpointing.
        tiny: Use a model of two small blocks instead of the flavor, for CPUs.
    """

    flavor: str = "8b"
    precision: str = "bf16"
    compile: bool = True
    dtype: str = "bfloat16"
    local_batch_size: int = 1
    seq_len: int = 8192
    steps: int = 20
    activation_checkpoint: str = "none"
    tiny: bool = False

    @property
    def window(self) -> int:
        """Return the steps between log lines. The first two windows are warmup."""
        return max(1, self.steps // 4)


# The 1b model stores parameters, gradients and optimizer state in fp32, because the 16 bytes per
# parameter fit into memory. Its embeddings are untied, because torchtitan 0.2.2 does not support
# tied embeddings.
_FP32_1B = GpuWorkload("1b", dtype="float32", local_batch_size=4)
# The most important cases come first, in case the time limit does not suffice for all.
WORKLOADS = {
    "8b bf16 compiled": GpuWorkload(),
    "8b float8 compiled": GpuWorkload(precision="float8"),
    "8b bf16 eager": GpuWorkload(compile=False),
    "1b bf16 compiled": _FP32_1B,
    "1b float8 compiled": replace(_FP32_1B, precision="float8"),
    "1b bf16 eager": replace(_FP32_1B, compile=False),
}
# The comparison with torchtitan stores all tensors in bf16. With fp32 parameters, torchtitan would
# use autocast, which computes norms and sums in fp32.
COMPARED = {
    name: replace(work, dtype="bfloat16") for name, work in WORKLOADS.items() if work.compile
}
COMPARED["8b, 4 sequences, bf16 compiled"] = GpuWorkload(  # fills 140 GB
    local_batch_size=4, steps=8, activation_checkpoint="full"
)
TINY_MODEL = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "ffn_dim": 128,
    "vocab_size": 4096,
}


def titanlite_options(
    work: GpuWorkload, folder: Path, text: Path, extra_features: bool
) -> list[str]:
    """Return the options of `titanlite train` for a workload.

    Args:
        work: The workload.
        folder: Output folder.
        text: Folder with JSON Lines files of text.
        extra_features: Also use features that torchtitan lacks: stochastic rounding of bf16
            weights, and a compiled optimizer and clipping.
    """
    settings: dict[str, object] = {
        "job.dump_folder": folder,
        "tokenizer.path": ROOT / "assets/tokenizer/tokenizer.json",
        "dataset.source": "jsonl",
        "dataset.path": text / "*.jsonl",
        "model.flavor": work.flavor,
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.local_batch_size,
        "training.steps": work.steps,
        "training.dtype": work.dtype,
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.mode": work.activation_checkpoint,
        "optimizer.lr": 3e-4,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": work.window,
    }
    if work.tiny:
        settings["float8.min_features"] = 0
        for name, value in TINY_MODEL.items():
            settings[f"model.{name}"] = value

    options = [str(option) for option in to_options(settings)]
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


def torchtitan_job(work: GpuWorkload, folder: Path, text: Path) -> dict[str, Any]:
    """Return the torchtitan job for a workload.

    The job stores all tensors in `work.dtype`, and rounds updates of parameters to nearest.

    Args:
        work: The workload.
        folder: Output folder.
        text: Folder with JSON Lines files of text.
    """
    job: dict[str, Any] = {
        "job": {"dump_folder": str(folder)},
        "model": {
            "name": "llama3",
            "flavor": {"8b": "8B", "1b": "1B"}[work.flavor],
            "hf_assets_path": str(ROOT / "assets/tokenizer"),
        },
        "experimental": {"custom_import": "gpu_torchtitan"},  # defines the flavor 1B
        "optimizer": {"name": "AdamW", "lr": 3e-4, "weight_decay": 0.1, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 1},
        "training": {
            # With this name, torchtitan loads local files.
            "dataset": "c4_test",
            "dataset_path": str(text),
            "seq_len": work.seq_len,
            "local_batch_size": work.local_batch_size,
            "steps": work.steps,
            "dtype": work.dtype,
            "mixed_precision_param": "bfloat16",
        },
        # As in titanlite, recomputing a block stops after the last activation that its backward
        # pass needs.
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
