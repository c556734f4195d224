"""The average of the weights: exact, in each checkpoint, and taken by whatever reads one."""

import math
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, small_trainer, titanlite
from safetensors.torch import load_file
from test_guards import Fault
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite import load_checkpoint
from titanlite.checkpoint.live_tensors import local
from titanlite.hooks.hook import StepResult, Training
from titanlite.model.formats import hf_name

pytestmark = pytest.mark.slow
DECAY = 0.75
STARTS = (  # each goes on after the one before
    ("2", ""),  # without an average
    ("4", f"--ema.decay {DECAY}"),
    ("6", f"--ema.decay {DECAY} --parallelism.tensor_parallel_degree 2"),
    ("8", f"--ema.decay {DECAY} --parallelism.pipeline_parallel_degree 2"),
    ("10", f"--ema.decay {DECAY} --training.enable_cpu_offload --training.dtype bfloat16"),
)


class Averaged(Fault):
    """Averages this rank's shards once more."""

    def built(self, training: Training) -> None:
        super().built(training)
        self._averages, self._weights = training.hook_tensors, dict(training.model.named_parameters())

    def averages(self) -> dict[str, Tensor]:
        found = {name.removeprefix("Ema."): each for name, each in self._averages().items() if name.startswith("Ema.")}
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}

    def started(self, step: int) -> None:
        self.first = {name: each.clone() for name, each in self.averages().items()}
        self.expected = {name: local(self._averages()[f"Ema.{name}"]).clone() for name in self.first}

    @torch.no_grad()
    def after_step(self, step: int, result: StepResult) -> None:
        for name, each in self.expected.items() if step not in self._faults else ():
            each.lerp_(local(self._weights[name]).float(), 1 - DECAY)

    def exact(self) -> bool:
        return all(torch.equal(each, local(self._averages()[f"Ema.{name}"])) for name, each in self.expected.items())


def averaged(folder: str) -> tuple[list[bool], dict[str, Tensor]]:
    """Of each start: whether all is as it should be; and the averages after the last one."""
    right, last = list[bool](), dict[str, Tensor]()
    for until, words in STARTS:
        hook = Averaged({3: math.nan, 7: math.nan})
        more = ("--model.n_kv_heads", "2", "--lr_scheduler.decay_ratio", "0", "--training.steps", until)
        with small_trainer(folder, hook, *words.split(), *more) as trainer:
            begun = last or hook.first if until != "4" else {n: w for n, w in trainer.model.state_dict().items()}
            begun = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in begun.items()}
            right += [all(torch.equal(each, begun[name]) for name, each in hook.first.items())]
            trainer.train()
            right += [hook.exact()]
            last |= hook.averages()
            if "pipeline" in words:
                parts = [last, last]
                torch.distributed.all_gather_object(parts, hook.averages())
                last = parts[0] | parts[1]
    return right, last


def test_the_average_is_exact_on_any_layout_and_is_what_other_commands_take(tmp_path: Path) -> None:
    ranks = run_ranks(2, averaged, str(tmp_path))
    last = ranks[0][1]
    assert [each for each, _ in ranks] == [[True] * 2 * len(STARTS)] * 2
    out = tmp_path / "out"
    titanlite("export", "--checkpoint", out, "--out", tmp_path / "hf", "--dtype", "float32", "--ema")
    exported, loaded = load_file(tmp_path / "hf" / "model.safetensors"), load_checkpoint(out, ema=True).model
    assert last.keys() == dict(loaded.named_parameters()).keys()
    for name, each in last.items():
        assert torch.equal(loaded.get_parameter(name), each)
        assert torch.equal(exported[hf_name(loaded.arch, name)], each)
    (tmp_path / "text.txt").write_text("import os\n" * 20)
    words = "eval", "--data", tmp_path / "text.txt", "--json", "--checkpoint"
    said = [titanlite(*words, out, *more).splitlines()[-1] for more in ((), ("--ema",))]
    assert said[0] != said[1]
    titanlite(*words, out / "checkpoint" / "step-00000002", "--ema", code=2)
