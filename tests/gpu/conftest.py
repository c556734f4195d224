"""What only a GPU can show, on small models. What makes sense on a CPU, too, runs on the device that there is."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is used: sums in one order

import pytest
import torch
import torch.distributed as dist

from titanlite.load_run import load_run
from titanlite.runtime.world import process_group
from titanlite.train.loop import Trainer

MODEL = {"dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 512}
TRAINING = {"seq_len": 128, "local_batch_size": 4, "steps": 100}  # of which a test runs the first ones
WORDS = [str(word) for name, value in MODEL.items() for word in (f"--model.{name}", value)]
WORDS += [str(word) for name, value in TRAINING.items() for word in (f"--training.{name}", value)]
WORDS += ["--metrics.no-enable_tensorboard", "--lr_scheduler.warmup_steps", "2", "--float8.min_features", "0"]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., AbstractContextManager[Trainer]]]:
    """`with training(*options) as trainer`: a trainer as `titanlite train` builds it."""

    @contextmanager
    def open_trainer(*options: str) -> Iterator[Trainer]:
        folder = ["--job.dump_folder", str(tmp_path / "run")]
        run = load_run([*WORDS, *folder, *options], world_size=1)
        try:
            with process_group(run.job) as device:
                trainer = Trainer(run, device)
                try:
                    yield trainer
                finally:
                    trainer.close()
        finally:
            if dist.is_initialized():  # after an error, or the next test could not start its own
                dist.destroy_process_group()

    yield open_trainer
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
