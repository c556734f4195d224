"""Invariants 2 and 4: the same rows anywhere, and after any restart."""

import json
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.schema import Dataset
from titanlite.data.documents import MAX_STREAMS
from titanlite.data.loader import Loader
from titanlite.data.reader import BatchReader
from titanlite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = load_tokenizer(ROOT / "assets/tokenizer/tokenizer.model")
GLOBAL, SEQ_LEN = 24, 32


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    generator = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(150):
            file.write(json.dumps({"text": f"<{i}> " + "word " * int(generator.integers(0, 90))}) + "\n")
    return Dataset(source="jsonl", path=str(path), num_workers=0)


class Ranks:
    """R loaders of one world in one process; `gather` meets at a barrier, as a collective does."""

    def __init__(self, dataset, size, *, local=1, seed=7, seq_len=SEQ_LEN, global_batch=GLOBAL, tokenizer=TOKENIZER):
        self.size = size
        values, barrier = {}, threading.Barrier(size)

        def gather_of(rank):
            def gather(value):
                values[rank] = value
                barrier.wait()
                return [values[r] for r in range(size)]

            return gather

        self.loaders = [
            Loader(
                dataset,
                tokenizer,
                seed=seed,
                seq_len=seq_len,
                global_batch_size=global_batch,
                local_batch_size=local,
                dp_rank=rank,
                dp_size=size,
                dp_group=None,
                device=torch.device("cpu"),
                gather=gather_of(rank),
            )
            for rank in range(size)
        ]

    def batch(self):
        """The next global batch, rows in their order: (G, T + 1)."""
        rows = {}
        for rank, loader in enumerate(self.loaders):
            batch = loader.next_global_batch()
            inputs = torch.cat([micro.input_ids for micro in batch.microbatches])
            labels = torch.cat([micro.labels for micro in batch.microbatches])
            assert torch.equal(inputs[:, 1:], labels[:, :-1])
            assert batch.num_valid_tokens == (labels != -100).sum()
            for i, row in enumerate(torch.cat([inputs, labels[:, -1:]], dim=1)):
                rows[rank + i * self.size] = row
        return torch.stack([rows[k] for k in range(len(rows))])

    def state(self):
        states = {}

        def save(rank):
            states[rank] = self.loaders[rank].state_dict()

        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(self.size)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert all(states[rank] == states[0] for rank in states)
        return json.loads(json.dumps(states[0]))

    def load(self, state):
        for loader in self.loaders:
            loader.load_state_dict(state)
        return self


STEPS = 20


@pytest.fixture(scope="module")
def reference(dataset):
    ranks = Ranks(dataset, 1)
    batches, states = [], []
    for _ in range(STEPS):
        batches.append(ranks.batch())
        states.append(ranks.state())
    return batches, states


@pytest.mark.parametrize(
    ("size", "local"), [(1, 24), (1, 3), (2, 1), (2, 12), (4, 2), (8, 1), (8, 3), (3, 4), (6, 2), (12, 1), (24, 1)]
)
def test_rows_and_states_do_not_depend_on_the_layout(dataset, reference, size, local):
    ranks = Ranks(dataset, size, local=local)
    for batch, state in zip(*reference, strict=True):
        assert torch.equal(ranks.batch(), batch)
        assert ranks.state() == state


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (8, 4, 2, 1), (3, 8, 1, 6), (2, 2, 12, 4)])
@pytest.mark.parametrize("every", [1, 3, 5])
def test_restarts_on_other_layouts_change_nothing(dataset, reference, sizes, every):
    batches, states = reference
    state = None
    for start in range(0, STEPS, every):
        ranks = Ranks(dataset, sizes[start // every % len(sizes)])
        if state is not None:
            ranks.load(state)
        for step in range(start, min(start + every, STEPS)):
            assert torch.equal(ranks.batch(), batches[step])
        state = ranks.state()
        assert state == states[min(start + every, STEPS) - 1]


def test_a_state_loaded_and_saved_is_the_same(dataset, reference):
    state = reference[1][4]
    assert Ranks(dataset, 2).load(state).state() == state
    assert len(json.dumps(state)) < 3000


def test_another_global_batch_size_goes_on_with_the_same_sequences(dataset, reference):
    batches, states = reference
    ranks = Ranks(dataset, 2, global_batch=8).load(states[3])
    assert torch.equal(torch.cat([ranks.batch() for _ in range(6)]), torch.cat(batches[4:6]))


def test_each_document_is_read_once_an_epoch_and_each_token_predicted_once(dataset):
    """Joined again, the rows of a stream are whole documents; together the streams hold each once an epoch."""
    ranks = Ranks(dataset, 1, global_batch=MAX_STREAMS)
    rows = torch.stack([ranks.batch() for _ in range(30)], dim=1)  # (V, rows, T + 1)
    assert torch.equal(rows[:, :-1, -1], rows[:, 1:, 0])  # the last token is the first of the next row
    streams = torch.cat([rows[:, :, :-1].flatten(1), rows[:, -1:, -1]], dim=1)
    turns = []
    for stream in streams.tolist():
        text = TOKENIZER.decode(stream)
        parts = text.split("<|end_of_text|>")[:-1]
        assert all(part.startswith("<|begin_of_text|><") for part in parts)
        turns.append([int(part.removeprefix("<|begin_of_text|><").split(">")[0]) for part in parts])
    positions = {v + turn * MAX_STREAMS: doc for v, docs in enumerate(turns) for turn, doc in enumerate(docs)}
    first = [positions[p] for p in range(150)]
    second = [positions[p] for p in range(150, 300)]
    assert sorted(first) == sorted(second) == list(range(150))
    assert first != second


def test_the_seed_changes_the_order_and_dataset_seed_wins(dataset):
    one, two = Ranks(dataset, 1, seed=1).batch(), Ranks(dataset, 1, seed=2).batch()
    assert not torch.equal(one, two)
    assert torch.equal(Ranks(dataset.model_copy(update={"seed": 2}), 1, seed=1).batch(), two)


def test_a_rank_tokenizes_only_its_own_streams(dataset):
    ranks = Ranks(dataset, 4)
    for _ in range(STEPS):
        ranks.batch()
    readers = [loader._reader for loader in ranks.loaders]
    touched = Counter(stream for reader in readers if isinstance(reader, BatchReader) for stream in reader._open)
    assert len(touched) == MAX_STREAMS
    assert set(touched.values()) == {1}


def test_what_changed_since_the_checkpoint_is_said(dataset, reference, tmp_path):
    state = reference[1][0]
    other = tmp_path / "a.jsonl"
    other.write_text(json.dumps({"text": "other " * 99}) + "\n")
    other = Dataset(source="jsonl", path=str(other))
    json_tokenizer = load_tokenizer(ROOT / "assets/tokenizer/tokenizer.json")
    for ranks, message in [
        (Ranks(other, 1), r"the source jsonl .*a\.jsonl is now jsonl .*a\.jsonl"),
        (Ranks(Dataset(), 1), r"the source jsonl .*a\.jsonl is now python_stdlib"),
        (Ranks(dataset, 1, tokenizer=json_tokenizer), "the tokenizer is another one"),
        (Ranks(dataset, 1, seed=8), "the seed of the data order was 7, it is now 8"),
        (Ranks(dataset, 1, seq_len=64), r"training\.seq_len was 32, it is now 64"),
    ]:
        with pytest.raises(UserError, match=message):
            ranks.load(state)
    with pytest.raises(CheckpointError, match="version 99"):
        Ranks(dataset, 1).load({**state, "version": 99})


def test_describe_names_the_source(dataset):
    assert Ranks(dataset, 1).loaders[0].describe().endswith("a.jsonl: 150 documents, 0.0 MB")


@pytest.mark.slow
def test_two_real_ranks_save_the_state_of_one(dataset, reference, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys
            import torch
            import torch.distributed as dist
            from titanlite.config.schema import Dataset
            from titanlite.data.loader import Loader
            from titanlite.data.tokenizer import load_tokenizer

            dist.init_process_group("gloo")
            loader = Loader(Dataset(source="jsonl", path=sys.argv[1]), load_tokenizer(sys.argv[2]), seed=7, seq_len=32,
                            global_batch_size=24, local_batch_size=4, dp_rank=dist.get_rank(), dp_size=2,
                            dp_group=dist.group.WORLD, device=torch.device("cpu"))
            rows = [[m.input_ids.tolist() for m in loader.next_global_batch().microbatches] for _ in range(4)]
            state = loader.state_dict()
            json.dump([rows, state], open(f"{sys.argv[3]}/rank{dist.get_rank()}.json", "w"))
            dist.destroy_process_group()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    arguments = [dataset.path, str(ROOT / "assets/tokenizer/tokenizer.model"), str(tmp_path)]
    subprocess.run(command + arguments, check=True, cwd=ROOT, timeout=120)
    batches, states = reference
    for rank in range(2):
        rows, state = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert state == states[3]
        for step, batch in enumerate(rows):
            assert torch.equal(torch.tensor(batch).flatten(0, 1), batches[step][rank::2, :-1])
