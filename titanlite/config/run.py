"""What a job means for a world of ranks. Each value that follows from the two is derived here, and nowhere else.

Invariant: a `Run` is immutable and knows no torch. `titanlite.load_run` makes it, and refuses a job that breaks a rule;
everything below takes the `Run`, or a part of it, and decides nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from titanlite.config.degrees import Degrees, degrees
from titanlite.config.flavors import Architecture, architecture
from titanlite.config.load import resolve_path
from titanlite.config.pipeline_stages import stage_parts
from titanlite.config.schema import JobConfig


@dataclass(frozen=True)
class Run:
    """A job on `world_size` ranks. A value is derived when it is first asked for: what a broken job has no value for,
    the rules do not ask for.

    Attributes:
        job: The job file and the command line, completed by what the named files decide.
        world_size: Ranks: processes of all machines together.
    """

    job: JobConfig
    world_size: int = 1

    @cached_property
    def arch(self) -> Architecture:
        """The flavor with the job's own numbers. Raises KeyError for an unknown flavor."""
        return architecture(self.job.model)

    @cached_property
    def degrees(self) -> Degrees:
        """Ranks along each dimension of the world."""
        return degrees(self.job.parallelism, self.world_size)

    @cached_property
    def stages(self) -> list[range]:
        """The blocks of each pipeline stage; one stage has them all where there is no pipeline."""
        if self.degrees.pipeline == 1:
            return [range(self.arch.n_layers)]
        return stage_parts(self.job.parallelism, self.arch, self.job.training.seq_len)

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        size = self.job.training.global_batch_size
        return self.job.training.local_batch_size * self.degrees.data if size == -1 else size

    @property
    def microbatches(self) -> int:
        """Forward passes of a data-parallel rank in one optimizer step."""
        return self.global_batch_size // (self.job.training.local_batch_size * self.degrees.data)

    @property
    def data_seed(self) -> int:
        """Seed of the order of the training data."""
        seed = self.job.dataset.seed
        return self.job.training.seed if seed is None else seed

    @property
    def validation_seed(self) -> int:
        """Seed of the choice of documents to validate on; held-out ones are chosen among the training data."""
        seed = self.job.dataset.seed if self.job.validation.holdout > 0 else self.job.validation.seed
        return self.job.training.seed if seed is None else seed

    @property
    def tokenizer_path(self) -> Path:
        """Where the tokenizer lies."""
        return resolve_path(self.job.tokenizer.path)

    @property
    def dump_folder(self) -> Path:
        """Folder of all outputs."""
        return Path(self.job.job.dump_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the step folders."""
        return self.dump_folder / self.job.checkpoint.folder

    def compiles(self, component: Literal["model", "loss", "optimizer", "clip"]) -> bool:
        """Whether torch.compile is asked for."""
        return self.job.compile.enable and component in self.job.compile.components

    @property
    def state_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype of the optimizer's two moments."""
        return self.job.optimizer.state_dtype or self.job.training.dtype
