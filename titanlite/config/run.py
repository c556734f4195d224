"""What a job means for a world of ranks. Each value that follows from the job and the world size is derived here only.

Invariant: a `Run` is immutable and does not use torch. `titanlite.load_run` makes it and refuses a job that breaks a
rule. All other code takes the `Run` or a part of it, and never derives such a value again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from titanlite.config.flavors import Architecture, architecture
from titanlite.config.layout import Degrees, degrees, stage_parts
from titanlite.config.load import resolve_path
from titanlite.config.schema import Component, JobConfig


@dataclass(frozen=True)
class Run:
    """A job on `world_size` ranks.

    A value is derived when it is first read. So a `Run` can be made of a job that is not valid yet, and the rules read
    only those values that exist.

    Attributes:
        job: The job file and the command line, with the values that depend on other files filled in.
        world_size: Number of ranks: the processes of all machines together.
    """

    job: JobConfig
    world_size: int = 1

    @cached_property
    def arch(self) -> Architecture:
        """The flavor with the overrides of the job. Raises KeyError for an unknown flavor."""
        return architecture(self.job.model)

    @cached_property
    def degrees(self) -> Degrees:
        """Number of ranks along each dimension of the world."""
        return degrees(self.job.parallelism, self.world_size)

    @cached_property
    def stages(self) -> list[range]:
        """The blocks of each pipeline stage. Without a pipeline there is one stage with all blocks."""
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
        """Seed of the choice of documents to validate on. With validation.holdout they come from the training data, so
        its seed is used."""
        seed = self.job.dataset.seed if self.job.validation.holdout > 0 else self.job.validation.seed
        return self.job.training.seed if seed is None else seed

    @property
    def tokenizer_path(self) -> Path:
        """Path of the tokenizer."""
        return resolve_path(self.job.tokenizer.path)

    @property
    def dump_folder(self) -> Path:
        """Folder of all outputs."""
        return Path(self.job.job.dump_folder)

    @property
    def checkpoint_folder(self) -> Path:
        """Folder that contains a folder per saved step."""
        return self.dump_folder / self.job.checkpoint.folder

    def compiles(self, component: Component) -> bool:
        """Whether the job asks to compile this component."""
        return self.job.compile.enable and component in self.job.compile.components

    @property
    def state_dtype(self) -> Literal["float32", "bfloat16"]:
        """Dtype of the optimizer's two moments."""
        return self.job.optimizer.state_dtype or self.job.training.dtype
