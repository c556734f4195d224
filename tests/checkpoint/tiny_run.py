"""A training run in miniature: a sharded Llama of two blocks, AdamW with two groups, data that depends on the step."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.resume import Resumer
from titanlite.checkpoint.save import Saver
from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import apply_activation_checkpointing

ARCHITECTURE = Architecture(32, 2, 4, 2, 48, vocab_size=64, max_seq_len=64)
ROWS, TOKENS = 4, 16


class Checkpoints:
    """The checkpoints of one run, saved and resumed as the trainer does it."""

    def __init__(self, config, folder, live, *, lines=None, job=None, write_tokenizer=None, **comparisons):
        log = (lambda line: None) if lines is None else lines.append
        self.folder = CheckpointFolder(config, folder, log)
        self.saver = Saver(self.folder, live, job=job, write_tokenizer=write_tokenizer)
        self.save, self.holds, self.stats = self.saver.save, self.saver.holds, self.saver.stats
        self.resumer = Resumer(self.folder, live, job=job, **comparisons)

    def load(self):
        state = self.resumer.load()
        self.saver.loaded_step = state["step"] if state else None
        return state

    def close(self):
        self.saver.close()
        self.folder.close()


class TinyRun:
    """Model, optimizer and step; keywords vary what is saved: `recomputes` is activation checkpointing, `rounded` the
    dtype of moments that are rounded by chance."""

    def __init__(
        self,
        *,
        seed=0,
        tied=False,
        recomputes=False,
        offload=False,
        hsdp=False,
        device="cpu",
        decay_embeddings=True,
        dtype=torch.float32,
        rounded=None,
    ):
        self.step, self.device = 0, device
        self.model = Llama(dataclasses.replace(ARCHITECTURE, tied_embeddings=tied))
        self.model.init_weights(seed)
        self.model.to(device, dtype)
        policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        world = dist.get_world_size()
        degrees = {"dp_replicate": world, "dp_shard": 1} if hsdp else {"dp_shard": world}
        mesh = init_device_mesh(device, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        if recomputes:
            apply_activation_checkpointing(self.model, schema.ActivationCheckpoint(mode="full"))
        for block in self.model.layers.values():
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if rounded:
            config = schema.Optimizer(lr=1e-2, state_dtype=rounded, stochastic_rounding=True)
            self.optimizer = build_optimizer(self.model, config)
            return
        named = list(self.model.named_parameters())
        decayed = {n for n, p in named if p.ndim == 2 and (decay_embeddings or "embed" not in n)}
        groups = [
            {"params": [p for n, p in named if n in decayed], "weight_decay": 0.1},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def manager(
        self,
        folder: Path,
        *,
        lines: list[str] | None = None,
        job=None,
        tokenizer="fingerprint",
        compare_data=None,
        write_tokenizer=None,
        **keys,
    ):
        return Checkpoints(
            schema.Checkpoint(**keys),
            folder,
            LiveState(self.model, self.optimizer),
            lines=lines,
            job=job,
            same_tokenizer=lambda fingerprint: fingerprint == tokenizer,
            compare_data=compare_data,
            write_tokenizer=write_tokenizer,
        )

    def train_state(self, step: int | None = None) -> dict:
        step = self.step if step is None else step
        return {"step": step, "tokens": 0, "cursor": {"row": step * ROWS}}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 + self.step)
            rows = torch.randint(64, (ROWS, TOKENS + 1), generator=generator)
            rows = rows.to(self.device)[dist.get_rank() :: dist.get_world_size()]
            logits = self.model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / (ROWS * TOKENS)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
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
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def go_on(folder: Path, first: int, last: int, hsdp: bool, keys: dict) -> list[float]:
    """The losses of a rank that loads what `folder` holds, trains from step `first` to `last`, and saves every second
    step. `keys` are some of [checkpoint]."""
    # Other initial weights for each number of ranks: only a real load can make runs agree.
    run = TinyRun(seed=dist.get_world_size(), hsdp=hsdp)
    lines: list[str] = []
    manager = run.manager(folder, lines=lines, **keys)
    state = manager.load()
    run.step = state["step"] if state else 0
    assert run.step == first, (run.step, lines)
    losses = []
    while run.step < last:
        losses += run.train(2)
        manager.save(run.step, run.train_state())
    manager.close()
    assert manager.stats()["failed_saves"] == 0, lines
    return losses


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(run: TinyRun) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in run.everything().items() if name[0].isalpha()}


def train_ranks(ranks: int, folder: Path, first: int, last: int, hsdp: bool = False, **keys: object) -> list[float]:
    return run_ranks(ranks, go_on, folder, first, last, hsdp, keys)[0]
