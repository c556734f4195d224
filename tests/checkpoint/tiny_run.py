"""A miniature training run for tests of checkpoints, which saves and resumes within a second.

It uses parts of the trainer on a Llama with two blocks. Its sequences depend on the step only. It
reads no data, writes no output folder and logs nothing.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_variants import merge

from titanlite.checkpoint.find import load_newest
from titanlite.checkpoint.live_state import LiveState
from titanlite.checkpoint.load import Resumer, load_weights
from titanlite.checkpoint.manifest import CheckpointContext, read_manifest
from titanlite.checkpoint.save import Saver
from titanlite.config import schema
from titanlite.config.run import Run
from titanlite.model.llama import Llama
from titanlite.model.microbatch import Microbatch
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.runtime.rank_group import RankGroup
from titanlite.train.step import TrainStep

BATCH_SIZE = 4
SEQ_LEN = 16
VOCAB_SIZE = 64
LEARNING_RATE = 1e-2
JOB = tomli.loads(f"""
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = {VOCAB_SIZE}
[training]
seq_len = {SEQ_LEN}
global_batch_size = {BATCH_SIZE}
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
""")


def train_state(step: int, **state: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 0, **state}


class Checkpoints:
    """The checkpoints of a run. Keyword arguments are options of section [checkpoint]."""

    def __init__(
        self,
        folder: Path,
        live: LiveState,
        *,
        job: dict[str, Any] | None = None,
        tokenizer: str = "fingerprint",
        compare_data: Callable[[dict[str, Any]], Any] | None = None,
        **keys: Any,
    ) -> None:
        self.lines: list[str] = []
        config = schema.Checkpoint(**keys)
        self.ranks = RankGroup(config.timeout_seconds)
        self.context = CheckpointContext(
            config, folder, live, self.ranks, lambda line: self.lines.append(str(line)), job
        )
        self.context.prepare_folder()
        self.saver = Saver(self.context)
        self.has_saved = self.saver.has_saved
        self.stats = self.saver.stats
        self.resumer = Resumer(self.context, lambda other: other == tokenizer, compare_data)

    def save(
        self,
        step: int,
        *,
        is_last: bool = False,
        **state: Any,
    ) -> None:
        """Save a step. `state` is added to the state of the trainer."""
        self.saver.save(step, lambda: train_state(step, **state), is_last=is_last)

    def load(self) -> Any:
        state = self.resumer.load()
        self.saver.loaded_step = state["step"] if state else None
        return state

    def close(self) -> None:
        self.saver.close()
        self.ranks.close()


class TinyRun:
    """A model and its optimizer. Keyword arguments are sections that change `JOB`."""

    def __init__(
        self,
        seed: int = 0,
        device: str = "cpu",
        **sections: Any,
    ) -> None:
        world_size = dist.get_world_size()
        training = {"local_batch_size": BATCH_SIZE // world_size, "seed": seed}
        job = schema.JobConfig.model_validate(merge(JOB, {"training": training}, sections))
        run = Run(job, world_size)
        self.device = torch.device(device)
        self.mesh = build_mesh(run.degrees, device)
        model = build_model(run, self.mesh, self.device, lambda line: None)
        self.train_step = TrainStep(run, self.mesh, model, self.device)
        self.model = self.train_step.model
        self.optimizer = self.train_step.optimizer
        self.step = 0

    def checkpoints(self, folder: Path, **keys: Any) -> Checkpoints:
        live = LiveState(self.model, self.optimizer, self.train_step.new_optimizer)
        return Checkpoints(folder, live, **keys)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            shape = (BATCH_SIZE, SEQ_LEN + 1)
            batch = torch.randint(VOCAB_SIZE, shape, generator=generator).to(self.device)
            sequences = batch[self.mesh.data_rank :: self.mesh.degrees.data]
            inputs = sequences[:, :-1]
            labels = sequences[:, 1:]
            microbatches = [Microbatch(inputs, labels)]
            loss = self.train_step(microbatches, labels.numel(), LEARNING_RATE).loss
            dist.all_reduce(loss)
            losses.append(loss.item())
            self.step += 1
        return losses

    def copy_state(self) -> dict[str, Tensor]:
        """Return full copies of all weights and optimizer states."""
        tensors = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{index}.{key}": value for key, value in state.items()}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            tensors[name] = whole.clone()
        return tensors

    def copy_weights(self) -> dict[str, Tensor]:
        state = self.copy_state()
        return {name: tensor for name, tensor in state.items() if name[0].isalpha()}

    def has_empty_optimizer(self) -> bool:
        states = self.optimizer.state.values()
        return not any(value.any() for state in states for value in state.values())


def assert_equal(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def load_model_weights(
    path: Path, model: Llama, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Load the weights of the newest valid checkpoint, and return `info` of its manifest."""

    def load(step_folder: Path) -> dict[str, Any]:
        load_weights(step_folder, model)
        return read_manifest(step_folder)["info"]

    return load_newest(path, load, log=log)


PROOF = Path("/tmp/titanlite-was-here")
"""Created when a `Malicious` object is unpickled."""


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {PROOF}",)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
