"""A checkpoint is data: loading one never runs code."""

import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from titanlite.checkpoint import state
from titanlite.checkpoint.storage import CommittingWriter, SafeReader

WAS_HERE = "/tmp/titanlite-was-here"


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {WAS_HERE}",)


class Nested:
    def __reduce__(self):
        return getattr, (torch.Size, "mro")


@pytest.mark.parametrize("planted", [Malicious(), Nested(), torch.nn.Linear, {"a": Malicious()}])
def test_a_planted_pickle_is_refused_before_it_runs(tmp_path, planted):
    metadata = Metadata(state_dict_metadata={}, planner_data=planted)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="has no place in a checkpoint"):
        SafeReader(tmp_path).read_metadata()
    assert not os.path.exists(WAS_HERE)


def test_entries_that_dcp_would_unpickle_without_restriction_are_refused(tmp_path):
    metadata = Metadata(state_dict_metadata={"model.norm.weight": BytesStorageMetadata()})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="BytesStorageMetadata"):
        SafeReader(tmp_path).read_metadata()


def test_something_else_than_an_index_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(pickle.UnpicklingError, match="holds a dict"):
        SafeReader(tmp_path).read_metadata()


def test_names_lose_what_wrappers_insert():
    name = "layers.0._checkpoint_wrapped_module._orig_mod.attention.wq.weight"
    assert state.clean_name(name) == "layers.0.attention.wq.weight"


def test_a_writer_in_the_background_never_waits_for_the_stream_of_the_training(tmp_path):
    writer = CommittingWriter(tmp_path, 1, "token", {})
    assert writer.per_thread_copy_ahead == 0  # or DCP copies "ahead" what is on the CPU, and waits for a GPU each time
