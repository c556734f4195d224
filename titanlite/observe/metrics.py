"""What a run measures: metrics.jsonl, TensorBoard, and the console line of a logged step.

Invariant (no host sync in the step): `record` keeps device tensors and never reads them. Only `log` reads them, on a
log step and with one transfer. Only rank 0 writes files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token
from titanlite.observe.logged_step import CURVES, VALIDATION_CURVES, Curve, LoggedStep, StepLine
from titanlite.runtime.logging import failed_writes

GIB = 2**30


class MetricsRecorder:
    """Collects on the device, reads on log steps.

    Args:
        run: the files in its output folder are continued, so `OutputFolder.start` must be called before.
        rank: only rank 0 writes files. The other ranks may log for their console line.
        device: the device of the recorded tensors. Its memory is reported.
        peak_flops: FLOP/s of one device. None if it is unknown; then there is no MFU.
        resumed_step: last step of the checkpoint that was loaded, 0 for a fresh start. TensorBoard hides later steps.
        tokens: number of tokens trained on up to `resumed_step`.
    """

    def __init__(
        self,
        run: Run,
        rank: int,
        device: torch.device,
        peak_flops: float | None,
        resumed_step: int = 0,
        tokens: int = 0,
    ) -> None:
        self._run = run
        self._device = device
        self._peak_flops = peak_flops
        self._flops_per_token = flops_per_token(run.arch, run.job.training.seq_len)
        self._total_steps = run.job.training.steps
        self._first_step = resumed_step + 1
        self._tokens_before = tokens  # up to the last logged step
        self.latest: LoggedStep | None = None
        self.memory_peak = 0.0  # GiB, the highest of all lines
        self.pace: float | None = None  # seconds of a step, the mean since the first line, whose steps warm up
        self._failed_writes = 0

        self._file = self._validation_file = self._samples_file = None
        self._tensorboard = None
        if rank == 0:
            run.dump_folder.mkdir(parents=True, exist_ok=True)
            self._file = (run.dump_folder / "metrics.jsonl").open("a", encoding="utf-8")
            self._validation_file = (run.dump_folder / "validation.jsonl").open("a", encoding="utf-8")
            if run.job.samples.freq:
                self._samples_file = (run.dump_folder / "samples.jsonl").open("a", encoding="utf-8")
            if run.job.metrics.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                purge = self._first_step if resumed_step else 0
                self._tensorboard = SummaryWriter(str(run.dump_folder / "tb"), purge_step=purge, flush_secs=10)

        self._loss: Tensor | None = None
        self._grad_norm: Tensor | None = None
        self._window_tokens: int | Tensor = 0
        self._data_time = 0.0
        self._start_time = self._window_start = time.perf_counter()
        self._window_step = resumed_step  # last step of the previous window
        self._warm: tuple[int, float] | None = None  # step and time of the first line
        self._eta = timedelta()

    def is_log_step(self, step: int) -> bool:
        """Whether to log: every `metrics.log_freq` steps, the first step after a start, and the last step of the
        run."""
        return step % self._run.job.metrics.log_freq == 0 or step in (self._first_step, self._total_steps)

    def record(self, loss: Tensor, grad_norm: Tensor, num_tokens: int | Tensor, data_time: float) -> None:
        """Record one step. Nothing is read from the device.

        Args:
            loss: scalar, the mean over the valid tokens of the global batch, summed over the ranks if the step is
                logged.
            grad_norm: scalar, a plain tensor.
            num_tokens: number of tokens of the global batch, or an integer tensor if it is on the device.
            data_time: seconds that the step waited for its data.
        """
        self._loss = loss.detach()
        self._grad_norm = grad_norm.detach()
        self._window_tokens = self._window_tokens + num_tokens
        self._data_time += data_time

    def log(self, step: int, lr: float, **counters: Any) -> StepLine:
        """Read the recorded tensors, write metrics.jsonl and TensorBoard, and return the console line.

        `counters` are fields of `LoggedStep` from other parts: utilization, skipped_records, failed_saves, save_waits.

        The numbers stay in `latest` for the guards, as host floats that can be NaN or infinite.
        """
        assert self._loss is not None, "log() before any record()"
        assert self._grad_norm is not None
        assert step > self._window_step, "logged twice"
        window_tokens = torch.as_tensor(self._window_tokens)
        scalars = [scalar.to(self._device, torch.float64) for scalar in (self._loss, self._grad_norm, window_tokens)]
        loss, grad_norm, tokens = torch.stack(scalars).tolist()  # the only wait for the device
        now = time.perf_counter()
        steps, seconds = step - self._window_step, now - self._window_start
        tps_per_device = tokens / seconds / self._run.world_size
        self._tokens_before += int(tokens)
        memory, memory_peak = _memory_gib(self._device)
        self.memory_peak = max(self.memory_peak, memory_peak)
        self.latest = LoggedStep(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=self._tokens_before,
            tps=tokens / seconds,
            tps_per_device=tps_per_device,
            mfu=None if self._peak_flops is None else tps_per_device * self._flops_per_token / self._peak_flops,
            memory=memory,
            memory_peak=memory_peak,
            data_time=self._data_time / steps,
            step_time=seconds / steps,
            elapsed=now - self._start_time,
            time=time.time(),
            failed_writes=self._failed_writes + failed_writes(),
            **counters,
        )
        self._write(self._file, self.latest.to_json(), CURVES, asdict(self.latest), step)
        self._eta = self._time_left(self.latest, now)
        self._window_tokens, self._data_time = 0, 0.0
        self._window_step, self._window_start = step, now
        return StepLine(self._line(self.latest))

    def validated(self, step: int, score: dict[str, float]) -> None:
        """Write the score of a validation after `step` to validation.jsonl and to TensorBoard."""
        finite = {name: value if math.isfinite(value) else str(value) for name, value in score.items()}
        line = json.dumps({"step": step, **finite}, allow_nan=False)
        self._write(self._validation_file, line, VALIDATION_CURVES, score, step)

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write completions after `step` to samples.jsonl, one line for each, and to TensorBoard.

        Args:
            samples: JSON values with the keys `prompt` and `completion`.
        """
        for number, sample in enumerate(samples):
            self._write(self._samples_file, json.dumps({"step": step, **sample}), {}, {}, step)
            self.add_texts({f"samples/{number}": f"{sample['prompt']}{sample['completion']}"}, step)

    def add_texts(self, texts: Mapping[str, str], step: int | None = None) -> None:
        """Show texts in TensorBoard by name, without formatting. `step` None: they describe this start."""
        if self._tensorboard is not None:
            with self._tolerating_a_full_disk():
                for name, text in texts.items():
                    self._tensorboard.add_text(
                        name, textwrap.indent(text, "    "), self._first_step - 1 if step is None else step
                    )

    def tokens_so_far(self) -> int:
        """Number of tokens trained on since step 1, for a checkpoint. Waits for the device if the number is there."""
        return self._tokens_before + int(self._window_tokens)

    def close(self) -> None:
        """Flush and close the files."""
        for output in (self._file, self._validation_file, self._samples_file, self._tensorboard):
            if output is not None:
                with self._tolerating_a_full_disk():
                    output.close()

    def _write(
        self,
        file: TextIO | None,
        line: str,
        curves: Mapping[str, Curve],
        values: Mapping[str, float | None],
        step: int,
    ) -> None:
        if file is not None:
            with self._tolerating_a_full_disk():  # a line that was not written stays in the buffer for the next try
                file.write(line + "\n")
                file.flush()  # so that readers see the line now, and a killed run keeps it
        if self._tensorboard is not None:
            points = [_point(curve, value) for name, curve in curves.items() if (value := values[name]) is not None]
            with self._tolerating_a_full_disk():
                board, self._tensorboard = self._tensorboard, None
                assert board.file_writer is not None
                for point in points:
                    board.file_writer.add_summary(point, step)
                self._tensorboard = board  # stays None after a failure, because its thread is dead

    @contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._failed_writes == 0:
                logging.getLogger("titanlite").warning(f"Training goes on, but its metrics cannot be written: {error}")
            self._failed_writes += 1

    def _time_left(self, entry: LoggedStep, now: float) -> timedelta:
        """The time left at the mean pace since the first line, whose steps include compilation and warm-up."""
        if self._warm is None:
            self._warm = (entry.step, now)
        warm_step, warm_time = self._warm
        if entry.step > warm_step:
            self.pace = (now - warm_time) / (entry.step - warm_step)
        pace = entry.step_time if self.pace is None else self.pace
        return timedelta(seconds=round(pace * (self._total_steps - entry.step)))

    def _line(self, entry: LoggedStep) -> str:
        width = len(str(self._total_steps))
        mfu = "" if entry.mfu is None else f"mfu {entry.mfu:.1%}  "
        return (
            f"step {entry.step:>{width}}/{self._total_steps}  loss {entry.loss:.4f}  grad_norm {entry.grad_norm:.3f}  "
            f"lr {entry.lr:.2e}  {entry.tps:,.0f} tokens/s  {mfu}{entry.memory:.2f} GiB  eta {self._eta}"
        )


def _point(curve: Curve, value: float) -> Any:
    """A point of a curve with its description, which `SummaryWriter.add_scalar` cannot write."""
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary  # pyright: ignore
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    metadata = create_summary_metadata(curve.tag, curve.description)
    metadata.data_class = DATA_CLASS_SCALAR  # otherwise TensorBoard ignores the rest of the metadata
    return Summary(value=[Summary.Value(tag=curve.tag, simple_value=value, metadata=metadata)])


def _memory_gib(device: torch.device) -> tuple[float, float]:
    """The fields `memory` and `memory_peak` of `LoggedStep`. On a GPU, this resets the peaks."""
    if device.type == "cuda":
        reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return reserved / GIB, allocated / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")
    if not statm.exists():  # outside of Linux only the peak is known
        return peak / GIB, peak / GIB
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident / GIB, max(peak, resident) / GIB  # because the kernel updates its peak a little late
