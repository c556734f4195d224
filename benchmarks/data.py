"""Measure tokenization, loading of prepared shards, and the cost of the loader during training.

    python benchmarks/data.py [--megabytes 96] [--processes 2] [--steps 40] [--out FILE]

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
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from runs import commit, paragraph, table
from torch.nn import functional as F

from titanlite.config.flavors import FLAVORS
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, TokenizerOptions, Training
from titanlite.data.batch import RankBatch
from titanlite.data.loader import Loader
from titanlite.data.prepare import prepare
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import TiktokenTokenizer, load_tokenizer
from titanlite.model.llama import Llama

TOKENIZER = Path(__file__).parents[1] / "assets" / "tokenizer" / "tokenizer.model"
DOCUMENT_CHARACTERS = 2000
WARMUP_STEPS = 2
TOKENS_PER_READING = 8e6
BATCHES_ON_CPU = 100


def parse() -> argparse.Namespace:
    """Parse the command line."""
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
    return parser.parse_args()


def main() -> None:
    """Run all measurements, print each result, and write the page."""
    options = parse()
    tokenizer = load_tokenizer(TOKENIZER)
    assert isinstance(tokenizer, TiktokenTokenizer)
    # The description contains the load average at the start, so create it before measuring.
    lines = ["# Speed of the data pipeline", "", describe_measurements(options), ""]

    def add(section: list[str]) -> None:
        lines.extend(section)
        print("\n".join(section), flush=True)

    add(measure_background_tokenization(tokenizer, options.steps))
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        documents, file = write_documents(folder, options.megabytes * 10**6)
        add(measure_tokenization(tokenizer, documents, file, folder, options))
        add(measure_reading(tokenizer, folder / "shards", options.repeats))
    options.out.write_text("\n".join(lines).rstrip() + "\n")


def describe_measurements(options: argparse.Namespace) -> str:
    """Return the first paragraph of the page."""
    arguments = f"--megabytes {options.megabytes} --processes {options.processes}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "tiktoken", "datasets"))
    return paragraph(
        "This page shows how fast titanlite tokenizes and reads training data. All numbers are "
        f"medians of {options.repeats} measurements with `python benchmarks/data.py {arguments}`. "
        f"They were measured on {os.cpu_count()} CPU cores (load {os.getloadavg()[0]:.1f} at the "
        f"start) with Python {platform.python_version()}, {versions} and {commit()}."
    )


def write_documents(folder: Path, size: int) -> tuple[list[str], Path]:
    """Write the standard library as short documents with `size` characters in total.

    Returns:
        The documents, and the file of JSON lines that contains them.
    """
    text = "".join(map(str, open_source(DataSource())))
    starts = range(0, len(text), DOCUMENT_CHARACTERS)
    documents = [text[start : start + DOCUMENT_CHARACTERS] for start in starts]
    num_documents = size // DOCUMENT_CHARACTERS
    repeated = [documents[index % len(documents)] for index in range(num_documents)]

    file = folder / "text.jsonl"
    with file.open("w") as stream:
        stream.writelines(json.dumps({"text": document}) + "\n" for document in repeated)
    return repeated, file


def measure_tokenization(
    tokenizer: TiktokenTokenizer,
    documents: list[str],
    file: Path,
    folder: Path,
    options: argparse.Namespace,
) -> list[str]:
    """Compare `prepare`, which reads and writes files, with batch encoding of tiktoken in memory.

    Args:
        tokenizer: The tokenizer.
        documents: The text in memory.
        file: The text as a file of JSON lines.
        folder: Folder in which `prepare` creates the folder "shards".
        options: Command line options.
    """
    job = JobConfig(
        dataset=Dataset(source="jsonl", path=str(file)),
        tokenizer=TokenizerOptions(path=str(TOKENIZER)),
    )
    shards = folder / "shards"
    prepare_seconds = []
    tiktoken_seconds = []
    num_tokens = 0
    for _ in range(options.repeats):
        start = time.perf_counter()
        batch = tokenizer.encoding.encode_ordinary_batch(documents, num_threads=options.processes)
        tiktoken_seconds.append(time.perf_counter() - start)
        num_tokens = sum(map(len, batch))
        del batch

        shutil.rmtree(shards, ignore_errors=True)
        start = time.perf_counter()
        prepare(Run(job), shards, options.processes)
        prepare_seconds.append(time.perf_counter() - start)
    return format_tokenization(num_tokens, options.processes, prepare_seconds, tiktoken_seconds)


def format_tokenization(
    num_tokens: int, num_cores: int, prepare_seconds: list[float], tiktoken_seconds: list[float]
) -> list[str]:
    """Format the results of `measure_tokenization`."""
    rows = []
    for name, times in (
        ("`titanlite prepare`: file to shards", prepare_seconds),
        ("tiktoken `encode_ordinary_batch`, texts in memory", tiktoken_seconds),
    ):
        seconds = statistics.median(times)
        rows.append([name, f"{seconds:.2f}", f"{num_tokens / seconds / 1e6:.2f}"])

    pairs = zip(prepare_seconds, tiktoken_seconds, strict=True)
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    speed_up = f"{ratio:.2f} times as fast as tiktoken"
    return [
        f"## Tokenizing {num_tokens:,} tokens, {num_cores} cores",
        "",
        "The table compares the speed of tokenization with tiktoken alone.",
        "",
        *table(["", "seconds", "million tokens/s"], rows),
        f"In the median pair of runs, `titanlite prepare` is {speed_up}.",
        "",
    ]


def measure_reading(tokenizer: TiktokenTokenizer, shards: Path, num_repeats: int) -> list[str]:
    """Measure loading batches of prepared shards on one core, up to tensors."""
    rows = []
    for seq_len in (512, 2048, 8192):
        dataset = Dataset(source="shards", path=str(shards), num_workers=0)
        loader = make_loader(dataset, tokenizer, seq_len, 2**18 // seq_len)
        # The first pass verifies the checksums.
        first_speed = measure_loader_speed(loader)
        speeds = [measure_loader_speed(loader) for _ in range(num_repeats)]
        rows.append([f"{seq_len:,}", f"{statistics.median(speeds):.1f}", f"{first_speed:.1f}"])
    introduction = paragraph(
        "The table shows how many tokens per second of CPU time are read in training order and "
        "converted to tensors."
    )
    header = ["seq_len", "million tokens/s", "first pass, which verifies checksums"]
    return [
        "## Reading prepared shards, one core",
        "",
        introduction,
        "",
        *table(header, rows),
    ]


def measure_loader_speed(loader: Loader) -> float:
    """Load several million tokens, and return millions of tokens per second of CPU time."""
    start = time.process_time()
    num_tokens = 0
    while num_tokens < TOKENS_PER_READING:
        batch = loader.next_global_batch()
        num_tokens += sum(microbatch.input_ids.numel() for microbatch in batch.microbatches)
    return num_tokens / (time.process_time() - start) / 1e6


@dataclass
class StepTimes:
    """Seconds of pairs of training steps.

    Attributes:
        fixed: Seconds of each step with a fixed batch.
        loaded: Seconds of each step with a batch of the loader.
        waits: Seconds of each wait for a batch of the loader.
    """

    fixed: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def measure_background_tokenization(tokenizer: TiktokenTokenizer, num_steps: int) -> list[str]:
    """Compare training steps with a fixed batch and with a loader.

    The loader tokenizes in a background process.
    """
    times = time_steps(tokenizer, num_steps)
    cpu_seconds = measure_cpu_seconds(tokenizer)

    fixed = statistics.median(times.fixed)
    loaded = statistics.median(times.loaded)
    wait = statistics.median(times.waits)
    pairs = zip(times.fixed, times.loaded, strict=True)
    difference = statistics.median(loaded / fixed for fixed, loaded in pairs) - 1
    wait_share = f"{wait / loaded:.2%} of a step"
    cpu_share = f"{cpu_seconds / fixed:.2%} of a step on one core"
    rows = [
        ["step with a fixed batch", f"{fixed * 1e3:.1f} ms"],
        ["step with the loader", f"{loaded * 1e3:.1f} ms"],
        ["median difference of a pair", f"{difference:+.1%}"],
        ["median wait for the batch (`data_time`)", f"{wait * 1e3:.2f} ms ({wait_share})"],
        [
            "CPU time to read, tokenize and pack a batch",
            f"{cpu_seconds * 1e3:.1f} ms ({cpu_share})",
        ],
    ]
    introduction = paragraph(
        "The table shows whether tokenization in the background slows down training. It compares "
        "training steps on a fixed batch with steps that get their batch from the loader, which "
        "tokenizes text in a background process. Each step trained the debug model on 8 sequences "
        f"of 512 tokens with {torch.get_num_threads()} threads. We measured {num_steps} pairs of "
        "steps."
    )
    return [
        "## Cost of background tokenization",
        "",
        introduction,
        "",
        *table(["", "value"], rows),
    ]


def time_steps(tokenizer: TiktokenTokenizer, num_steps: int) -> StepTimes:
    """Train with a fixed batch and with batches of a loader, in turns."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Llama(FLAVORS["debugmodel"])
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = make_loader(Dataset(), tokenizer, 512, 8)
    fixed_batch = loader.next_global_batch()

    times = StepTimes()
    for step in range(num_steps + WARMUP_STEPS):
        start = time.perf_counter()
        train_step(model, optimizer, fixed_batch)
        fixed_end = time.perf_counter()
        batch = loader.next_global_batch()
        wait_end = time.perf_counter()
        train_step(model, optimizer, batch)
        if step >= WARMUP_STEPS:
            times.fixed.append(fixed_end - start)
            times.loaded.append(time.perf_counter() - fixed_end)
            times.waits.append(wait_end - fixed_end)
    loader.close()
    return times


def train_step(model: Llama, optimizer: torch.optim.Optimizer, batch: RankBatch) -> None:
    """Train on one batch."""
    for microbatch in batch.microbatches:
        logits = model(microbatch.input_ids).flatten(0, 1).float()
        F.cross_entropy(logits, microbatch.labels.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_cpu_seconds(tokenizer: TiktokenTokenizer) -> float:
    """Return the CPU time to read, tokenize and pack a batch in this process, in seconds."""
    loader = make_loader(Dataset(num_workers=0), tokenizer, 512, 8)
    loader.next_global_batch()
    start = time.process_time()
    for _ in range(BATCHES_ON_CPU):
        loader.next_global_batch()
    return (time.process_time() - start) / BATCHES_ON_CPU


def make_loader(
    dataset: Dataset, tokenizer: TiktokenTokenizer, seq_len: int, batch_size: int
) -> Loader:
    """Return the loader of one rank."""
    training = Training(seq_len=seq_len, local_batch_size=batch_size)
    job = JobConfig(dataset=dataset, training=training)
    return Loader(Run(job), tokenizer, 0, None, torch.device("cpu"))


if __name__ == "__main__":
    main()
