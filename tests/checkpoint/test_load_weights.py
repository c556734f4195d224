"""Weights without the rest: a new run starts from them, a model takes them."""

import pytest
from tiny_run import TinyRun, assert_equal, train_ranks, weights

from titanlite.checkpoint import find
from titanlite.checkpoint.huggingface import HuggingFaceWriter
from titanlite.checkpoint.load_weights import load_model_weights
from titanlite.checkpoint.rank_agreement import Ranks
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


def test_weights_alone_load_into_an_unsharded_model(two_saved):
    folder, run = two_saved
    expected = {k: v for k, v in run.everything().items() if k in dict(run.model.named_parameters())}
    for path in (folder, folder / "step-00000004"):
        model = Llama(run.model.arch)
        info = load_model_weights(path, model)
        assert info["train_state"]["step"] == 4
        assert_equal(dict(model.state_dict()), expected)


def test_a_new_run_starts_from_the_weights_of_another(two_saved, tmp_path):
    folder, run = two_saved
    lines: list[str] = []
    fresh = TinyRun(seed=99)
    manager = fresh.manager(tmp_path / "new" / "checkpoint", lines=lines, initial_load_path=str(folder))
    assert manager.load() is None
    assert lines[-1] == f"starting from the weights in {folder / 'step-00000004'}"
    assert_equal(dict(weights(fresh)), dict(weights(run)))
    assert not fresh.optimizer.state
    fresh.train(1)
    manager.save(1, fresh.train_state())
    resumed = TinyRun(seed=98)  # once there is something to resume, the initial weights are not read again
    state = resumed.manager(tmp_path / "new" / "checkpoint", initial_load_path="nowhere").load()
    assert state is not None
    assert_equal(resumed.everything(), fresh.everything())


def test_the_first_rank_alone_looks_which_weights_are_the_newest(two_saved, tmp_path, monkeypatch):
    """A run that goes on there could show each rank another one."""
    folder, _ = two_saved
    manager = TinyRun().manager(tmp_path / "new" / "checkpoint", initial_load_path=str(folder))
    asked: list[str] = []
    on_rank0 = Ranks.on_rank0
    monkeypatch.setattr(Ranks, "on_rank0", lambda ranks, find: (asked.append("rank 0"), on_rank0(ranks, find))[1])
    checkpoints_at = find.checkpoints_at
    monkeypatch.setattr(find, "checkpoints_at", lambda path: (asked.append("look"), checkpoints_at(path))[1])
    manager.load()
    assert asked[-2:] == ["rank 0", "look"]
    assert asked.count("look") == 1


@pytest.mark.slow
def test_each_rank_reads_its_slices_of_a_hugging_face_folder(tmp_path):
    run = TinyRun(seed=7)
    writer = HuggingFaceWriter(tmp_path / "hf", run.model.arch, "float32")
    tensors = run.everything()
    for name in writer.names:
        writer.add(name, tensors[name])
    writer.publish()
    keys = {"initial_load_path": str(tmp_path / "hf"), "initial_load_in_hf": True}
    losses = train_ranks(2, tmp_path / "checkpoint", 0, 2, **keys)
    assert losses == pytest.approx(run.train(2), abs=1e-5)  # fp32 sums in another order
