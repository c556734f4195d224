"""Small documents, sources and loaders for the tests of the data pipeline."""

import json
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from small_runs import ROOT

from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, Training, Validation
from titanlite.data.loader import Loader
from titanlite.data.shuffle import permuted
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.validation import ValidationSet

TOKENIZER_PATH = ROOT / "assets/tokenizer/tokenizer.model"
TOKENIZER = load_tokenizer(TOKENIZER_PATH)
CPU = torch.device("cpu")


def some_texts(count, seed=0, words=90, mark=""):
    """Return texts of very different lengths. Each text starts with its number."""
    generator = np.random.default_rng(seed)
    texts = []
    for i in range(count):
        num_words = int(generator.integers(0, words))
        texts.append(f"<{mark}{i}> " + "word " * num_words)
    return texts


def write_jsonl(path, texts, **columns):
    lines = []
    for i, text in enumerate(texts):
        other_fields = {name: values[i] for name, values in columns.items()}
        lines.append(json.dumps({"id": i, "text": text, **other_fields}) + "\n")
    with pyarrow.output_stream(str(path)) as file:  # compresses .gz and .zst files
        file.write("".join(lines).encode())
    return path


def write_parquet(path, texts, **columns):
    table = pyarrow.table({**columns, "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=20)


def encode(text):
    """Return the ids of a document with BOS and EOS."""
    return [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]


def write_megatron(path, documents, dtype="uint16", cuts=1):
    """Write a .bin file and its .idx file, with each document cut into `cuts` sequences."""
    pieces = []
    for ids in documents:
        pieces += np.array_split(np.array(ids, dtype), cuts)
    lengths = np.array([len(piece) for piece in pieces], "<i4")
    ends = np.cumsum(lengths, dtype="<i8")
    starts = (ends - lengths) * np.dtype(dtype).itemsize
    bounds = np.arange(0, len(pieces) + 1, cuts, dtype="<i8")
    code = {"int32": 4, "uint16": 8}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(pieces), len(bounds))
    path.write_bytes(np.concatenate(pieces).tobytes())
    index = [array.tobytes() for array in (lengths, starts, bounds)]
    path.with_suffix(".idx").write_bytes(header + b"".join(index))


def write_datatrove(path, documents, dtype="uint16"):
    """Write a .ds file and its .ds.index file."""
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    ends = np.cumsum([len(ids) for ids in documents], dtype="<u8")
    path.with_name(f"{path.name}.index").write_bytes(ends.tobytes())


def write_hub(folder, texts, files=6):
    """Write a local repository that `datasets` can load."""
    folder.mkdir()
    for i in range(files):
        write_jsonl(folder / f"train-{i}.jsonl", texts[i::files])
    return folder


def hide_bad_records(path, texts, count=1, bad="not json"):
    """Write texts with bad lines that a start does not inspect, and return the line numbers."""
    total = len(texts) + count
    inspected = permuted(np.arange(64), total, "sample").tolist()
    hidden = [number for number in range(100, total) if number not in inspected][:count]
    lines = [json.dumps({"text": text}) for text in texts]
    for number in hidden:
        lines.insert(number, bad)
    path.write_text("\n".join(lines) + "\n")
    return [number + 1 for number in hidden]


def make_dataset(source, path, **keys):
    return Dataset(source=source, path=str(path), num_workers=0, **keys)


def jsonl_dataset(folder, texts, **keys):
    return make_dataset("jsonl", write_jsonl(folder / "a.jsonl", texts), **keys)


def change(dataset, **keys):
    return dataset.model_copy(update=keys)


def load_smaller_tokenizer(folder):
    """Load a tokenizer without the last token of TOKENIZER."""
    path = folder / "tokenizer.model"
    lines = TOKENIZER_PATH.read_bytes().splitlines()
    path.write_bytes(b"\n".join(lines[:-1]))
    return load_tokenizer(path)


def make_mixture(*sources, **keys):
    """Create a dataset of (JSON lines file, weight) pairs."""
    specs = []
    for path, weight in sources:
        specs.append(DataSource(source="jsonl", path=str(path), weight=weight))
    return Dataset(sources=tuple(specs), num_workers=0, **keys)


def make_run(dataset, validation=None, dp_size=1, **training):
    """Create a run that reads `dataset`. Other keywords are keys of [training]."""
    keys = {"seed": 7, "seq_len": 32, "global_batch_size": 24, "local_batch_size": 1, **training}
    validation = validation or Validation()
    job = JobConfig(dataset=dataset, validation=validation, training=Training(**keys))
    return Run(job, dp_size)


def make_loader(dataset, *, tokenizer=TOKENIZER, holdout=0.0, data_rank=0, **keys):
    run = make_run(dataset, Validation(holdout=holdout), **keys)
    return Loader(run, tokenizer, data_rank, None, CPU, lambda: False)


def make_validation(
    validation,
    dataset,
    *,
    rank=0,
    size=1,
    local=3,
    **keys,
):
    run = make_run(dataset, validation, size, local_batch_size=local, **keys)
    return ValidationSet(run, TOKENIZER, rank, CPU)


def find_documents(input_ids):
    """Return the numbers of the texts of `some_texts` that begin in consecutive sequences."""
    text = TOKENIZER.decode(input_ids.flatten().tolist())
    return re.findall(r"<\|begin_of_text\|><(\d+)>", text)


class RankLoaders:
    """The loaders of all ranks of a run, which exchange state through a barrier."""

    def __init__(self, dataset, size, **keys):
        self.size = size
        self._values = {}
        self._barrier = threading.Barrier(size)
        self.loaders = []
        for rank in range(size):
            loader = make_loader(dataset, data_rank=rank, dp_size=size, **keys)
            loader._gather = partial(self._gather, rank)
            self.loaders.append(loader)

    def _gather(self, rank, value):
        self._values[rank] = value
        self._barrier.wait()
        gathered = [self._values[r] for r in range(self.size)]
        # The next call must not overwrite the values before all ranks have read them.
        self._barrier.wait()
        return gathered

    def batch(self):
        """Read the next global batch, and return inputs and labels as (G, 2, T)."""
        ranks = []
        for loader in self.loaders:
            batch = loader.next_global_batch()
            inputs = torch.cat([micro.input_ids for micro in batch.microbatches])
            labels = torch.cat([micro.labels for micro in batch.microbatches])
            assert batch.num_valid_tokens == (labels != -100).sum()
            ranks.append(torch.stack([inputs, labels], dim=1))
        # The ranks take turns: sequence k belongs to rank k % size.
        return torch.stack(ranks, dim=1).flatten(0, 1)

    def call(self, function):
        """Call a function of a loader on all ranks at once, and return the results."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(function, self.loaders))

    def state(self):
        states = self.call(Loader.state_dict)
        assert all(state == states[0] for state in states)
        return json.loads(json.dumps(states[0]))

    def load(self, state):
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self

    def close(self):
        for loader in self.loaders:
            loader.close()
