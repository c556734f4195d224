"""A training run in miniature: the trainer's own parts on a Llama of two blocks, with rows that depend on the step.

It reads no data, writes no output folder and logs nothing, so that a test of checkpoints makes several within a second.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from train_variants import merge

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.find import use_newest
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.resume import Resumer, load_checked_weights
from titanlite.checkpoint.save import Saver
from titanlite.config import schema
from titanlite.config.run import Run
from titanlite.data.batch import Microbatch
from titanlite.model.llama import Llama
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.train.step import TrainStep

ROWS, TOKENS, VOCABULARY, RATE = 4, 16, 64, 1e-2
JOB: dict[str, dict[str, Any]] = {
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": VOCABULARY},
    "training": {"seq_len": TOKENS, "global_batch_size": ROWS, "mixed_precision_param": "float32"},
    "activation_checkpoint": {"mode": "none"},
}


class Checkpoints:
    """The checkpoints of one run, saved and resumed as the trainer does it. `keys` are some of [checkpoint]."""

    def __init__(self, folder, live, *, lines=None, job=None, tokenizer="fingerprint", compare_data=None, **keys):
        log = [].append if lines is None else lines.append
        self.folder = CheckpointFolder(schema.Checkpoint(**keys), folder, live, log, job)
        self.saver = Saver(self.folder)
        self.save, self.holds, self.stats = self.saver.save, self.saver.holds, self.saver.stats
        self.resumer = Resumer(self.folder, lambda fingerprint: fingerprint == tokenizer, compare_data)

    def load(self) -> Any:
        state = self.resumer.load()
        self.saver.loaded_step = state["step"] if state else None
        return state

    def close(self) -> None:
        self.saver.close()
        self.folder.ranks.close()


class TinyRun:
    """A model, its optimizer and their steps, as the trainer builds and does them. The other keywords are sections of
    the job: their keys replace those of JOB."""

    def __init__(self, seed: int = 0, device: str = "cpu", **sections: Mapping[str, Any]) -> None:
        world, self.step, self.device = dist.get_world_size(), 0, torch.device(device)
        job = merge(JOB, {"training": {"local_batch_size": ROWS // world, "seed": seed}}, sections)
        run = Run(schema.JobConfig.model_validate(job), world)
        self.mesh = build_mesh(run.degrees, device)
        self.update = TrainStep(run, self.mesh, build_model(run, self.mesh, self.device, lambda _: None), self.device)
        self.model, self.optimizer = self.update.model, self.update.optimizer

    def manager(self, folder: Path, **keys: Any) -> Checkpoints:
        return Checkpoints(folder, LiveState(self.model, self.optimizer), **keys)

    def train_state(self, step: int | None = None) -> dict[str, Any]:
        step = self.step if step is None else step
        return {"step": step, "tokens": 0, "cursor": {"row": step * ROWS}}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            rows = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator).to(self.device)
            own = rows[self.mesh.data_rank :: self.mesh.data_degree]
            loss = self.update([Microbatch(own[:, :-1], own[:, 1:])], own[:, 1:].numel(), RATE).loss
            dist.all_reduce(loss)
            losses.append(loss.item())
            self.step += 1
        return losses

    def everything(self) -> dict[str, torch.Tensor]:
        """Full copies of all weights and optimizer states."""
        tensors = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{index}.{key}": value for key, value in state.items()}
        return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in tensors.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def weights(run: TinyRun) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in run.everything().items() if name[0].isalpha()}


def load_model_weights(path: Path, model: Llama, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Load the weights of the newest good checkpoint at a path, and return what its manifest says."""
    return step_folders.read_manifest(use_newest(path, lambda step: load_checked_weights(step, model), log=log))["info"]


WAS_HERE = Path("/tmp/titanlite-was-here")


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {WAS_HERE}",)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
