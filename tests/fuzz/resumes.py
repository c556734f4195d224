"""Resume after resume from a folder of two checkpoints, of which the newest was altered."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from mutants import ends_well
from test_manifest import DATA
from tiny_run import TinyRun, assert_equal

from titanlite.config.schema import JobConfig


class Resumes:
    """Two checkpoints of a run, and a run that resumes from them again and again.

    Attributes:
        good: the newest checkpoint as it was written.
        index: its index.
    """

    def __init__(self, tmp_path: Path) -> None:
        job = JobConfig().model_dump(mode="json")
        self._written, self.folder = tmp_path / "written", tmp_path / "altered"
        run, self._expected = TinyRun(), {}
        manager = run.manager(self._written, job=job)
        for step in (2, 4):
            run.train(2)
            data = DATA | {"schedule": DATA["schedule"] | {"step": step}}
            manager.save(step, {"step": step, "tokens": 64 * step, "data": data})
            self._expected[step] = run.everything()
        manager.close()
        self.good = self._written / "step-00000004"
        self.index = (self.good / ".metadata").read_bytes()
        self._run = TinyRun(seed=9)
        self._manager = self._run.manager(self.folder, job=job)

    def lay_out(self, alter: Callable[[Path], object]) -> None:
        """Put both checkpoints into the folder, the newest as `alter` makes it."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._written, self.folder)
        alter(self.folder / self.good.name)

    def resume(self, number: int, alter: Callable[[Path], object]) -> bool:
        """Whether the altered checkpoint was resumed from. Fails the test unless a resume gives the tensors of the
        altered checkpoint or of the older one exactly, or is refused in words."""
        self.lay_out(alter)
        steps = []

        def act() -> None:
            with torch.no_grad():
                for parameter in self._run.model.parameters():
                    parameter.zero_()
            state = self._manager.load()
            assert state is not None
            assert_equal(self._run.everything(), self._expected[state["step"]])
            assert (self.folder / "step-00000004.damaged").exists() == (state["step"] == 2)
            steps.append(state["step"])

        ends_well(number, act)
        return steps == [4]
