"""Train a Llama in plain PyTorch, as a baseline without a framework.

    python benchmarks/plain.py --data FOLDER/shard-00000.bin [--dtype bf16] [--compile]
    torchrun --standalone --nproc_per_node=2 benchmarks/plain.py --data ...        FSDP2 over gloo

The script uses fused AdamW, `clip_grad_norm_`, `F.cross_entropy` on fp32 logits, and token ids from
a memory map. `--compile` compiles the blocks and the loss. `--dtype bf16` computes in bf16 and
keeps parameters, gradients and optimizer state in fp32, as FSDP2 mixed precision does, also on a
single process. (Autocast would keep the residual stream in fp32, which is more work.)

It prints one line of JSON: the loss of each step, and the time at which each step ended.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to x of shape (B, T, H, D), with cos and sin of (T, 1, D / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return rotated.type_as(x)


class PlainBlock(nn.Module):
    """A pre-norm block with grouped-query attention and SwiGLU: (B, T, C) -> (B, T, C)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        dim = options.dim
        self.head_dim = dim // options.n_heads
        kv_dim = options.n_kv_heads * self.head_dim

        self.attention_norm = nn.RMSNorm(dim, 1e-5)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_dim, bias=False)
        self.wv = nn.Linear(dim, kv_dim, bias=False)

        self.ffn_norm = nn.RMSNorm(dim, 1e-5)
        self.w1 = nn.Linear(dim, options.ffn_dim, bias=False)
        self.w3 = nn.Linear(dim, options.ffn_dim, bias=False)
        self.w2 = nn.Linear(options.ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the outputs of attention and of the feed-forward network to x."""
        h = self.attention_norm(x)
        q = self.wq(h).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.wk(h).unflatten(-1, (-1, self.head_dim))
        v = self.wv(h).unflatten(-1, (-1, self.head_dim))

        q = rotate(q, cos, sin).transpose(1, 2)  # (B, H, T, D)
        k = rotate(k, cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(-2))

        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class PlainLlama(nn.Module):
    """A Llama: token ids (B, T) -> logits (B, T, V)."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(options.vocab_size, options.dim)
        self.blocks = nn.ModuleList(PlainBlock(options) for _ in range(options.n_layers))
        self.norm = nn.RMSNorm(options.dim, 1e-5)
        self.output = nn.Linear(options.dim, options.vocab_size, bias=False)

        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

        frequencies = 10000.0 ** -torch.arange(0, 1, 2 * options.n_heads / options.dim)
        angles = torch.arange(options.seq_len)[:, None, None] * frequencies  # (T, 1, D / 2)
        # Plain attributes stay in fp32. Buffers would be cast with the model.
        self.cos = angles.cos()
        self.sin = angles.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, T, V) and labels (B, T), computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batches(
    options: argparse.Namespace, rank: int, num_ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's tokens and labels of each step, both of shape (B, T).

    The ranks take turns to read consecutive ranges of the file.
    """
    ids = np.memmap(options.data, dtype="<u2", mode="r")
    size = options.batch_size * (options.seq_len + 1)
    for step in range(options.steps):
        start = (step * num_ranks + rank) * size % (len(ids) - size)
        token_range = torch.from_numpy(ids[start : start + size].astype(np.int64))
        sequences = token_range.view(options.batch_size, -1)  # (B, T + 1)
        yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def shard(model: PlainLlama, dtype: torch.dtype) -> None:
    """Apply FSDP2 to each block and to the root."""
    dist.init_process_group("gloo")

    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW that applies weight decay to matrices only."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)


def move_gradients(parameters: list[nn.Parameter], masters: list[nn.Parameter]) -> None:
    """Convert the gradients of bf16 parameters to fp32 and move them to the fp32 masters."""
    for parameter, master in zip(parameters, masters, strict=True):
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
        parameter.grad = None


def main(options: argparse.Namespace) -> None:
    """Train for `options.steps` steps and print the losses and times as JSON."""
    rank = int(os.environ.get("RANK", "0"))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    is_sharded = num_ranks > 1
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]

    torch.manual_seed(0)
    model = PlainLlama(options)
    if options.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)

    # FSDP2 holds the fp32 parameters itself. Without it, the optimizer trains fp32 copies.
    masters = []
    if is_sharded:
        shard(model, dtype)
    elif dtype != torch.float32:
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        model.to(dtype)
    parameters = list(model.parameters())
    trained = masters or parameters
    optimizer = make_optimizer(trained)
    loss_fn = torch.compile(mean_loss) if options.compile else mean_loss

    losses = []
    ends = []
    for tokens, labels in batches(options, rank, num_ranks):
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        if masters:
            move_gradients(parameters, masters)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)  # pyright: ignore
        losses.append(loss.item())
        ends.append(time.time())

    if rank == 0:
        print(json.dumps({"losses": losses, "ends": ends}), flush=True)
    if is_sharded:
        dist.barrier()
        # Skip the shutdown of Python: a gloo thread that frees a tensor during it sometimes aborts.
        os._exit(0)


def parse() -> argparse.Namespace:
    """Parse the command line."""
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
        "seq_len": 256,
        "batch_size": 8,
        "steps": 20,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
