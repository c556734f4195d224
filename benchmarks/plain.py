"""Train a Llama in plain PyTorch, as a baseline without a framework.

    python benchmarks/plain.py --data FOLDER/shard-00000.bin [--dtype bf16] [--compile] [--fsdp]
    torchrun --standalone --nproc_per_node=2 benchmarks/plain.py --data ...        FSDP2 over gloo

It uses fused AdamW, gradient clipping of torch, F.cross_entropy on fp32 logits, and token ids from
a memory map. --compile compiles the blocks and the loss. bf16 is mixed precision of FSDP2, also on
one
process: fp32 parameters, gradients and optimizer state, and all computation in bf16. Autocast would
keep the residual stream in fp32, which is more work. Prints one line of JSON.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, T, H, D) with cos and sin (T, 1, D / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Block(nn.Module):
    """A pre-norm block with grouped-query attention and SwiGLU: (B, T, C) -> (B, T, C)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        dim, self.head = options.dim, options.dim // options.n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, options.n_kv_heads * self.head, bias=False)
        self.wv = nn.Linear(dim, options.n_kv_heads * self.head, bias=False)
        self.w1, self.w3 = (nn.Linear(dim, options.ffn_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(options.ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (-1, self.head)) for project in (self.wq, self.wk, self.wv)
        )
        q, k, v = (
            y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v)
        )  # (B, H, T, D)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(h.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    """A Llama: token ids (B, T) -> logits (B, T, V)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(options.vocab_size, options.dim)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.n_layers))
        self.norm = nn.RMSNorm(options.dim, 1e-5)
        self.output = nn.Linear(options.dim, options.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        frequencies = 10000.0 ** -torch.arange(0, 1, 2 * options.n_heads / options.dim)
        angles = torch.arange(options.seq_len)[:, None, None] * frequencies  # (T, 1, D / 2)
        self.cos, self.sin = angles.cos(), angles.sin()  # no buffers: they stay fp32

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batches(options: argparse.Namespace, rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels (B, T) of this rank for each step, consecutive pieces of the file."""
    ids = np.memmap(options.data, dtype="<u2", mode="r")
    size = options.rows * (options.seq_len + 1)
    for step in range(options.steps):
        start = (step * ranks + rank) * size % (len(ids) - size)
        piece = torch.from_numpy(ids[start : start + size].astype(np.int64)).view(options.rows, -1)
        yield piece[:, :-1].contiguous(), piece[:, 1:].contiguous()


def main(options: argparse.Namespace) -> None:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    sharded, dtype = (
        options.fsdp or ranks > 1,
        {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype],
    )
    torch.manual_seed(0)
    model, masters = Llama(options), []
    if options.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)
    if sharded:
        alone = (
            {}
            if "MASTER_ADDR" in os.environ
            else {"store": HashStore(), "rank": 0, "world_size": 1}
        )
        dist.init_process_group("gloo", **alone)
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy)
    elif dtype != torch.float32:
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        model.to(dtype)
    trained = masters or list(model.parameters())
    decayed, not_decayed = (
        [p for p in trained if (p.ndim > 1) == wanted] for wanted in (True, False)
    )
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    loss_fn = torch.compile(mean_loss) if options.compile else mean_loss
    losses, ends = [], []
    for tokens, labels in batches(options, rank, ranks):
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        for master, parameter in zip(masters, model.parameters() if masters else (), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_([*model.parameters()], [*masters])  # pyright: ignore
        losses.append(loss.item())
        ends.append(time.time())
    if rank == 0:
        print(json.dumps({"losses": losses, "ends": ends}), flush=True)
    if sharded:
        dist.barrier()
        os._exit(
            0
        )  # a gloo thread that lets go of a tensor while Python shuts down aborts the process now and then


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, help="uint16 token ids: the .bin file of `titanlite prepare`"
    )
    sizes = {
        "dim": 256,
        "n_layers": 6,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 640,
        "vocab_size": 4096,
    }
    for name, default in (sizes | {"seq_len": 256, "rows": 8, "steps": 20}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fsdp", action="store_true", help="use FSDP2 on one process as well")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
