"""Measure tokenization, loading of prepared shards, and the cost of the loader during training.

    python benchmarks/data.py [--megabytes 96] [--processes 2] [--steps 40] [--out benchmarks/data.md]

The text is the Python standard library in documents of 2,000 characters, about 600 tokens as in web
pages, repeated up to the given size. Both sides of a comparison run in turns, several times, and
the medians are reported, so other load on the machine slows both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from runs import commit
from torch.nn import functional as F

from titanlite.config.flavors import FLAVORS
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, TokenizerOptions, Training
from titanlite.data.loader import Loader
from titanlite.data.prepare import prepare
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import TiktokenTokenizer, load_tokenizer
from titanlite.model.llama import Llama

TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer" / "tokenizer.model"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=40, help="training steps with and without the loader"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    tokenizer = load_tokenizer(TOKENIZER)
    assert isinstance(tokenizer, TiktokenTokenizer)

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "tiktoken", "datasets"))
    command = (
        f"python benchmarks/data.py --megabytes {options.megabytes} --processes {options.processes}"
    )
    machine = f"{os.cpu_count()} CPU cores (load {os.getloadavg()[0]:.1f} at the start)"
    lines = [
        "# Speed of the data pipeline",
        "",
        "This page shows how fast titanlite tokenizes and reads training data. All numbers are medians of "
        f"{options.repeats} measurements with `{command}`. They were measured on {machine} with Python "
        f"{platform.python_version()}, {versions} and {commit()}.",
        "",
    ]

    def add(section: list[str]) -> None:
        lines.extend(section)
        print("\n".join(section), flush=True)

    add(stepping(tokenizer, options.steps))
    with tempfile.TemporaryDirectory(prefix="data-") as folder:
        texts, file = write_text(Path(folder), options.megabytes * 10**6)
        add(tokenizing(tokenizer, texts, file, Path(folder), options.processes, options.repeats))
        add(reading(tokenizer, Path(folder) / "shards", options.repeats))
    options.out.write_text("\n".join(lines).rstrip() + "\n")


def write_text(folder: Path, size: int) -> tuple[list[str], Path]:
    """Return the standard library as short documents of `size` bytes, in memory and as JSON lines."""
    whole = "".join(map(str, open_source(DataSource())))
    documents = [whole[i : i + 2000] for i in range(0, len(whole), 2000)]
    texts = [documents[i % len(documents)] for i in range(size // 2000)]
    file = folder / "text.jsonl"
    with file.open("w") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return texts, file


def tokenizing(
    tokenizer: TiktokenTokenizer,
    texts: list[str],
    file: Path,
    folder: Path,
    processes: int,
    repeats: int,
) -> list[str]:
    """Compare `prepare`, which reads and writes files, with batch encoding of tiktoken in memory."""
    job = JobConfig(
        dataset=Dataset(source="jsonl", path=str(file)),
        tokenizer=TokenizerOptions(path=str(TOKENIZER)),
    )
    ours = []
    theirs = []
    tokens = 0
    for _ in range(repeats):
        start = time.perf_counter()
        batch = tokenizer.encoding.encode_ordinary_batch(texts, num_threads=processes)
        theirs.append(time.perf_counter() - start)
        tokens = sum(map(len, batch))
        del batch
        shutil.rmtree(folder / "shards", ignore_errors=True)
        start = time.perf_counter()
        prepare(Run(job), folder / "shards", processes)
        ours.append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return [
        f"## Tokenizing {tokens:,} tokens, {processes} cores",
        "",
        "| | seconds | million tokens/s |",
        "|---|---:|---:|",
        *(
            f"| {name} | {statistics.median(times):.2f} | {tokens / statistics.median(times) / 1e6:.2f} |"
            for name, times in (
                ("`titanlite prepare`: file to shards", ours),
                ("tiktoken `encode_ordinary_batch`, texts in memory", theirs),
            )
        ),
        "",
        f"In the median pair of runs, `titanlite prepare` is {ratio:.2f} times as fast as tiktoken.",
        "",
    ]


def reading(tokenizer: TiktokenTokenizer, shards: Path, repeats: int) -> list[str]:
    """Measure loading batches of prepared shards on one core, up to tensors."""
    rows = []
    for seq_len in (512, 2048, 8192):
        dataset = Dataset(source="shards", path=str(shards), num_workers=0)
        loader = make_loader(dataset, tokenizer, seq_len, 2**18 // seq_len)
        rates = []
        for _ in range(repeats + 1):
            start = time.process_time()
            tokens = 0
            while tokens < 8e6:
                tokens += sum(m.input_ids.numel() for m in loader.next_global_batch().microbatches)
            rates.append(tokens / (time.process_time() - start) / 1e6)
        first, *later = rates
        rows.append(f"| {seq_len:,} | {statistics.median(later):.1f} | {first:.1f} |")
    return [
        "## Reading prepared shards, one core",
        "",
        "The table shows how many tokens per second of CPU time are read in training order and converted to tensors.",
        "",
        "| seq_len | million tokens/s | first pass, which verifies checksums |",
        "|---:|---:|---:|",
        *rows,
        "",
    ]


def stepping(tokenizer: TiktokenTokenizer, steps: int) -> list[str]:
    """Compare training steps with a fixed batch and with a loader that tokenizes in the background."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Llama(FLAVORS["debugmodel"])
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = make_loader(Dataset(), tokenizer, 512, 8)
    fixed = loader.next_global_batch()

    def train(batch: object) -> None:
        for micro in batch.microbatches:  # type: ignore[attr-defined]
            loss = F.cross_entropy(
                model(micro.input_ids).flatten(0, 1).float(), micro.labels.flatten()
            )
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    alone = []
    beside = []
    waits = []
    for step in range(steps + 2):
        start = time.perf_counter()
        train(fixed)
        middle = time.perf_counter()
        batch = loader.next_global_batch()
        got = time.perf_counter()
        train(batch)
        if step >= 2:
            alone.append(middle - start)
            beside.append(time.perf_counter() - middle)
            waits.append(got - middle)
    loader.close()
    here = make_loader(Dataset(num_workers=0), tokenizer, 512, 8)
    here.next_global_batch()
    cpu = time.process_time()
    for _ in range(100):
        here.next_global_batch()
    cpu = (time.process_time() - cpu) / 100
    difference = statistics.median(b / a for a, b in zip(alone, beside, strict=True)) - 1
    return [
        "## Cost of background tokenization",
        "",
        "The table shows whether tokenization in the background slows down training. It compares training steps on a "
        "fixed batch with steps that get their batch from the loader, which tokenizes text in a background process. "
        "Each step trained "
        f"the debug model on 8 sequences of 512 tokens with {torch.get_num_threads()} threads. We measured {steps} "
        "pairs of steps.",
        "",
        "| | value |",
        "|---|---:|",
        f"| step with a fixed batch | {statistics.median(alone) * 1e3:.1f} ms |",
        f"| step with the loader | {statistics.median(beside) * 1e3:.1f} ms |",
        f"| median difference of a pair | {difference:+.1%} |",
        f"| median wait for the batch (`data_time`) | {statistics.median(waits) * 1e3:.2f} ms "
        f"({statistics.median(waits) / statistics.median(beside):.2%} of a step) |",
        f"| CPU time to read, tokenize and pack a batch | {cpu * 1e3:.1f} ms "
        f"({cpu / statistics.median(alone):.2%} of a step on one core) |",
        "",
    ]


def make_loader(dataset: Dataset, tokenizer: TiktokenTokenizer, seq_len: int, rows: int) -> Loader:
    job = JobConfig(dataset=dataset, training=Training(seq_len=seq_len, local_batch_size=rows))
    return Loader(Run(job), tokenizer, 0, None, torch.device("cpu"))


if __name__ == "__main__":
    main()
