"""What the last save of a run leaves: weights alone, a model for transformers, and never two results under one name."""

import pytest
import torch
from tiny_run import TinyRun, assert_equal, names, weights

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.huggingface import HuggingFaceReader, HuggingFaceWriter
from titanlite.checkpoint.load_weights import load_model_weights
from titanlite.config.errors import CheckpointError
from titanlite.model.llama import Llama

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_last_save_of_the_weights_alone_is_never_resumed_from(tmp_path):
    run = TinyRun()
    manager = run.manager(tmp_path / "checkpoint", last_save_model_only=True)
    run.train(1)
    manager.save(1, run.train_state(1))
    run.train(1)
    manager.save(2, run.train_state(2), last=True)
    manager.close()
    assert names(tmp_path / "checkpoint") == ["step-00000001"]
    assert names(tmp_path / "final") == ["step-00000002"]
    sizes = [step_folders.folder_size(path) for path in (tmp_path / "checkpoint", tmp_path / "final")]
    assert sizes[1] < 0.5 * sizes[0]
    resumed = TinyRun(seed=99)
    state = resumed.manager(tmp_path / "checkpoint").load()
    assert state is not None
    assert state["step"] == 1
    with pytest.raises(CheckpointError, match="holds weights only"):
        TinyRun().manager(tmp_path / "final").load()
    model = Llama(run.model.arch)
    load_model_weights(tmp_path / "final", model)
    assert_equal(dict(model.state_dict()), weights(run))


@pytest.mark.parametrize("model_only", [False, True])
def test_the_last_save_can_be_for_transformers_too(tmp_path, model_only):
    run = TinyRun()
    keys = {"last_save_in_hf": True, "last_save_model_only": model_only, "async_mode": "async"}
    manager = run.manager(tmp_path / "checkpoint", write_tokenizer=lambda folder: {"bos_token_id": 1}, **keys)
    manager.save(2, run.train_state(2), last=True)
    manager.close()
    with HuggingFaceReader(tmp_path / "final_hf") as reader:
        assert torch.equal(reader.read("norm.weight"), run.everything()["norm.weight"])


@pytest.mark.parametrize("model_only", [False, True])
def test_results_of_an_earlier_last_step_are_superseded(tmp_path, model_only):
    keys = {"last_save_in_hf": True, "last_save_model_only": model_only}
    final = "final" if model_only else "checkpoint"
    run, lines = TinyRun(), []

    def last_save(step: int) -> None:
        manager = run.manager(tmp_path / "checkpoint", lines=lines, write_tokenizer=lambda folder: {}, **keys)
        if manager.load() is None or step > run.step:
            run.train(1)
            run.step = step
        manager.save(step, run.train_state(step), last=True)
        manager.close()
        assert manager.holds(step)
        with HuggingFaceReader(tmp_path / "final_hf") as reader:
            assert torch.equal(reader.read("norm.weight"), run.everything()["norm.weight"])
        model = Llama(run.model.arch)
        load_model_weights(tmp_path / final / step_folders.step_name(step), model)
        assert_equal(dict(model.state_dict()), weights(run))

    last_save(4)
    last_save(8)
    assert (tmp_path / "final_hf.superseded").is_dir()
    lines.clear()
    if model_only:  # nothing to resume from: step 8 is trained once more
        last_save(8)
        assert names(tmp_path / "final") == ["step-00000004", "step-00000008", "step-00000008.superseded"]
    else:
        last_save(8)
        assert lines[-1] == f"{tmp_path}/final_hf exists already and is kept"


def test_a_failed_export_leaves_nothing_and_is_a_failed_save(tmp_path, monkeypatch):
    run, lines = TinyRun(), []
    keys = {"last_save_in_hf": True, "write_tokenizer": lambda folder: {}}
    manager = run.manager(tmp_path / "checkpoint", lines=lines, **keys)
    run.train(1)
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(HuggingFaceWriter, "publish", lambda *args: (_ for _ in ()).throw(no_space))
    manager.save(1, run.train_state(1), last=True)
    monkeypatch.undo()
    manager.close()
    assert f"writing {tmp_path}/final_hf FAILED" in lines[-1]
    assert "No space left on device" in lines[-1]
    assert manager.stats()["failed_saves"] == 1
    assert not manager.holds(1)
    assert not (tmp_path / "final_hf").exists()
    assert step_folders.list_unfinished(tmp_path) == []
    manager = run.manager(tmp_path / "checkpoint", **keys)
    manager.load()
    manager.save(1, run.train_state(1), last=True)
    assert manager.holds(1)
    assert (tmp_path / "final_hf").is_dir()


def test_leftovers_of_a_last_save_are_removed_too(tmp_path):
    for name in ("final/.tmp-step-00000002-x", ".tmp-final_hf-y", ".tmp-mine"):
        (tmp_path / name).mkdir(parents=True)
    lines: list[str] = []
    TinyRun().manager(tmp_path / "checkpoint", lines=lines)
    assert lines == ["removed 2 unfinished checkpoint folders: .tmp-step-00000002-x, .tmp-final_hf-y"]
    assert names(tmp_path) == [".checkpoint.lock", ".tmp-mine", "checkpoint", "final"]
