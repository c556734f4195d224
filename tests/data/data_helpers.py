"""Small documents, and the ranks of one world in one process."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from titanlite.config.run import Run
from titanlite.config.schema import Comm, Dataset, JobConfig, Training, Validation
from titanlite.data.loader import Loader
from titanlite.data.shuffle import permuted
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.validation import ValidationSet

ROOT = Path(__file__).parents[2]
TOKENIZER_PATH = ROOT / "assets/tokenizer/tokenizer.model"
TOKENIZER = load_tokenizer(TOKENIZER_PATH)


def some_texts(count, seed=0, words=90, mark=""):
    """Texts of very different lengths, each of which says its number."""
    generator = np.random.default_rng(seed)
    return [f"<{mark}{i}> " + "word " * int(generator.integers(0, words)) for i in range(count)]


def write_jsonl(path, texts):
    with pyarrow.output_stream(str(path)) as file:  # compressed as its suffix says
        file.write("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode())
    return path


def write_parquet(path, texts, **columns):
    pyarrow.parquet.write_table(pyarrow.table({**columns, "text": texts}), path, row_group_size=20)


def write_hub(folder, texts, files=6):
    """A local repository as `datasets` reads it: jsonl files."""
    folder.mkdir()
    for i in range(files):
        write_jsonl(folder / f"train-{i}.jsonl", texts[i::files])
    return folder


def hide_bad_records(path, texts, count=1, bad="not json"):
    """Write `texts` with bad lines that the first look at the data does not see; returns their line numbers."""
    total = len(texts) + count
    seen = set(permuted(np.arange(64), total, "sample").tolist())
    hidden = [number for number in range(100, total) if number not in seen][:count]
    lines = [json.dumps({"text": text}) for text in texts]
    for number in hidden:
        lines.insert(number, bad)
    path.write_text("\n".join(lines) + "\n")
    return [number + 1 for number in hidden]


def dataset_of(tmp_path, texts, **keys):
    return Dataset(source="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", texts)), num_workers=0, **keys)


def run_of(dataset, validation=None, dp_size=1, comm=None, **training):
    """The run of a job that reads `dataset`; the other keywords are keys of [training]."""
    keys = {"seed": 7, "seq_len": 32, "global_batch_size": 24, "local_batch_size": 1, **training}
    validation, comm = validation or Validation(), Comm(**(comm or {}))
    return Run(JobConfig(dataset=dataset, comm=comm, validation=validation, training=Training(**keys)), dp_size)


def make_loader(dataset, *, tokenizer=TOKENIZER, holdout=0.0, dp_rank=0, dp_group=None, stopping=lambda: False, **keys):
    """A loader of rank 0 of 1 unless told otherwise."""
    run = run_of(dataset, Validation(holdout=holdout), **keys)
    return Loader(run, tokenizer, dp_rank, dp_group, torch.device("cpu"), stopping)


def make_validation(validation, dataset, *, rank=0, size=1, local=3, **keys):
    """The rows of [validation] on one rank."""
    run = run_of(dataset, validation, size, local_batch_size=local, **keys)
    return ValidationSet(run, TOKENIZER, rank, torch.device("cpu"))


class Ranks:
    """R loaders of one world, which meet at a barrier in place of a collective."""

    def __init__(self, dataset, size, *, local=1, global_batch=24, **keys):
        self.size, self._values, self._barrier = size, {}, threading.Barrier(size)
        keys |= {"global_batch_size": global_batch, "local_batch_size": local, "dp_size": size}
        self.loaders = [make_loader(dataset, dp_rank=rank, **keys) for rank in range(size)]
        for rank, loader in enumerate(self.loaders):
            loader._gather = partial(self._gather, rank)

    def _gather(self, rank, value):
        self._values[rank] = value
        self._barrier.wait()
        gathered = [self._values[r] for r in range(self.size)]
        self._barrier.wait()  # or the next call could write what another rank has not read yet
        return gathered

    def batch(self):
        """The next global batch, rows in their order: (G, 2, T), inputs and labels."""
        rows = {}
        for rank, loader in enumerate(self.loaders):
            batch = loader.next_global_batch()
            inputs = torch.cat([micro.input_ids for micro in batch.microbatches])
            labels = torch.cat([micro.labels for micro in batch.microbatches])
            assert batch.num_valid_tokens == (labels != -100).sum()
            for i, row in enumerate(torch.stack([inputs, labels], dim=1)):
                rows[rank + i * self.size] = row
        return torch.stack([rows[k] for k in range(len(rows))])

    def together(self, call):
        """What `call` returns for each loader, where ranks wait for each other."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(call, self.loaders))

    def state(self):
        states = self.together(Loader.state_dict)
        assert all(state == states[0] for state in states)
        return json.loads(json.dumps(states[0]))

    def load(self, state):
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self

    def close(self):
        for loader in self.loaders:
            loader.close()
