"""Selecting the attention kernels of a run, and rejecting kernels that its device lacks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig
from titanlite.model.attention import backend_order

SUPPORTED_GPUS = {
    "varlen": (range(8, 100), "an Ampere GPU (compute capability 8.0) or newer"),
    "fa3": ((9,), "a Hopper GPU (compute capability 9.0)"),
    "fa4": ((9, 10), "a Hopper or Blackwell GPU (compute capability 9.0 or 10.0)"),
}
"""For each backend that needs certain GPUs: their major compute capabilities and a description."""
FLASH_PACKAGES = {
    "fa3": "Install FlashAttention 3 from the folder hopper of "
    "https://github.com/Dao-AILab/flash-attention, or choose another backend.",
    "fa4": "Install it with `pip install flash-attn-4`, or choose another backend.",
}
"""For each backend: how to install its kernels, as the end of an error message."""


@contextmanager
def attention_kernels(job: JobConfig, device: torch.device) -> Iterator[None]:
    """Use the attention kernels of `model.attention_backend` during a `with` block.

    On a GPU, set the order in which torch tries its kernels, and activate the package of the
    backends "fa3" and "fa4". The end of the block restores both. The settings are global, so use a
    single `with` block around the whole run.

    Raises:
        UserError: If the device does not support the backend, or its package is not installed.
    """
    backend = job.model.attention_backend
    problem = _find_device_problem(job, device)
    if problem:
        raise UserError(f'model.attention_backend = "{backend}" {problem}')
    if device.type == "cpu":  # there is only one fused kernel, so there is nothing to select
        yield
        return

    if job.model.uses_document_bounds:
        _register_varlen_operator()
    prefers_flash = backend in FLASH_PACKAGES  # otherwise, new GPUs try cuDNN first
    with _active_flash_package(backend), backend_order(device, prefers_flash=prefers_flash):
        yield


def _register_varlen_operator() -> None:
    """Register the torch operator of variable-length attention by importing its module.

    Activation checkpointing looks up this operator, so it must be registered first. The import
    takes seconds, so call this function only for jobs that use this kind of attention.
    """
    importlib.import_module("torch.nn.attention.varlen")


@contextmanager
def _active_flash_package(backend: str) -> Iterator[None]:
    """Activate the FlashAttention package of the backend "fa3" or "fa4" during a `with` block.

    Do nothing for other backends, which need no package.

    Raises:
        UserError: If the package cannot be loaded.
    """
    if backend not in FLASH_PACKAGES:
        yield
        return
    try:
        activate_flash_attention_impl(backend.upper())  # torch names them "FA3" and "FA4"
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f'model.attention_backend = "{backend}" cannot load its kernels ({error}). '
            f"{FLASH_PACKAGES[backend]}"
        ) from None
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _find_device_problem(job: JobConfig, device: torch.device) -> str:
    """Return why the device cannot run the attention backend of the job, or "" if it can.

    The result completes an error message that starts with the option, for example "needs a GPU.".
    The backend "varlen" is allowed on a CPU, where other kernels compute the same values.
    """
    backend = job.model.attention_backend
    if device.type == "cpu":
        needs_gpu = backend in ("flex", "fa3", "fa4")
        return 'needs a GPU. Set it to "auto" to train on a CPU.' if needs_gpu else ""
    if not job.model.uses_document_bounds:
        return ""
    if job.training.mixed_precision_param == "float32":
        return 'needs training.mixed_precision_param = "bfloat16". Change one of them.'
    return _find_gpu_problem(backend, device)


def _find_gpu_problem(backend: str, device: torch.device) -> str:
    """Return why a GPU does not support `backend` ("varlen", "fa3" or "fa4"), or "" if it does."""
    major, _ = torch.cuda.get_device_capability(device)
    supported, description = SUPPORTED_GPUS[backend]
    if major in supported:
        return ""
    return f'needs {description}, not {torch.cuda.get_device_name(device)}. Set it to "auto".'
