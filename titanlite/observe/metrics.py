"""What a run measures: metrics.jsonl, TensorBoard, and the console line of a logged step.

Invariant (no host sync in the step): `record` keeps device tensors and never reads them; only `log`, on a log step,
does, all of them in one transfer. Only rank 0 writes files. May import `titanlite.config.schema` and torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from titanlite.config.schema import Metrics

GIB = 2**30


@dataclass(frozen=True)
class LoggedStep:
    """A line of metrics.jsonl: one JSON object with these keys.

    Rates and times are over the steps since the previous line, in wall-clock time (saving and all else included).
    JSON has no NaN or infinity: such a value is null there and stands in one more key, {"nonfinite": {"loss": "nan"}}.
    """

    step: int
    """Optimizer steps done, from 1."""
    loss: float
    """Mean cross entropy over the valid tokens of this step's global batch, nats."""
    grad_norm: float
    """L2 norm of this step's gradient before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens trained on since step 1, whatever the number of restarts."""
    tps: float
    """Tokens a second of the whole world."""
    tps_per_device: float
    """Tokens a second of one device."""
    mfu: float | None
    """Model FLOP/s as a share of the peak dense bfloat16 FLOP/s; null where that is unknown, as on a CPU."""
    memory: float
    """GiB. GPU: peak reserved by the allocator since the previous line. CPU: resident set of this process."""
    memory_peak: float
    """GiB. GPU: peak allocated to tensors since the previous line. CPU: largest resident set so far."""
    data_time: float
    """Seconds that a step waited for its data, mean."""
    step_time: float
    """Seconds that a step took, mean."""
    elapsed: float
    """Seconds since this start of the program began to train."""
    time: float
    """Unix time."""
    utilization: float = 1.0
    """Share of the positions of all rows so far that a loss was computed for; packing and masks leave some out."""
    skipped_records: int = 0
    """Records of the data that could not be read, on rank 0, since this start (dataset.on_bad_record = "skip")."""
    failed_saves: int = 0
    """Checkpoints that could not be written, since this start."""
    save_waits: int = 0
    """Saves that had to wait for the end of the one before, since this start."""
    failed_writes: int = 0
    """Times that metrics could not be written (disk full), since this start."""

    def to_json(self) -> str:
        """One line of strict JSON."""
        values = asdict(self)
        nonfinite = {name: str(x) for name, x in values.items() if x is not None and not math.isfinite(x)}
        if nonfinite:
            values |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        return json.dumps(values, allow_nan=False)


class MetricsRecorder:
    """Collects on the device, reads on log steps.

    Args:
        dump_folder: metrics.jsonl and tb/ are written there; a resumed run continues them.
        config: the job file's [metrics].
        rank: files are written by rank 0 alone; the other ranks may log for their console line.
        flops_per_token: training FLOPs of one token (`flops.flops_per_token`).
        peak_flops: of one device, FLOP/s; None if unknown, then there is no MFU.
        world_size: number of devices.
        device: where the recorded tensors live and whose memory is reported.
        total_steps: steps of the whole run.
        resumed_step: last step of the checkpoint that was loaded; 0 for a fresh start. Entries of later steps, left
            by a run that crashed after its last save, are dropped from metrics.jsonl and hidden in TensorBoard.
        tokens: tokens trained on up to `resumed_step`.
    """

    def __init__(
        self,
        dump_folder: Path,
        config: Metrics,
        rank: int,
        flops_per_token: float,
        peak_flops: float | None,
        world_size: int,
        device: torch.device,
        total_steps: int,
        resumed_step: int = 0,
        tokens: int = 0,
    ) -> None:
        self._config = config
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._world_size = world_size
        self._device = device
        self._total_steps = total_steps
        self._first_step = resumed_step + 1
        self._tokens_before = tokens  # up to the last logged step
        self.latest: LoggedStep | None = None
        self._failed_writes = 0

        self._file = self._validation_file = None
        self._tensorboard = None
        if rank == 0:
            dump_folder.mkdir(parents=True, exist_ok=True)
            path = dump_folder / "metrics.jsonl"
            drop_entries_after(path, resumed_step)
            self._file = path.open("a", encoding="utf-8")
            validations = dump_folder / "validation.jsonl"
            drop_entries_after(validations, resumed_step or -1)  # a fresh run validates first
            self._validation_file = validations.open("a", encoding="utf-8")
            if config.enable_tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                purge = self._first_step if resumed_step else 0
                self._tensorboard = SummaryWriter(str(dump_folder / "tb"), purge_step=purge, flush_secs=10)

        self._loss: Tensor | None = None
        self._grad_norm: Tensor | None = None
        self._window_tokens: int | Tensor = 0
        self._data_time = 0.0
        self._start_time = self._window_start = time.perf_counter()
        self._window_step = resumed_step  # last step of the previous window
        self._warm: tuple[int, float] | None = None  # step and time of the first line
        self._eta = timedelta()

    def is_log_step(self, step: int) -> bool:
        """Every `metrics.log_freq` steps, the first step after a start, and the last of the run."""
        return step % self._config.log_freq == 0 or step in (self._first_step, self._total_steps)

    def record(self, loss: Tensor, grad_norm: Tensor, num_tokens: int | Tensor, data_time: float) -> None:
        """Note one step; nothing is read from the device.

        Args:
            loss: scalar, the token-weighted mean of the global batch (already reduced over the ranks).
            grad_norm: scalar, a plain tensor.
            num_tokens: tokens of the global batch; an integer tensor if only the device knows.
            data_time: seconds that the step waited for its data.
        """
        self._loss = loss.detach()
        self._grad_norm = grad_norm.detach()
        self._window_tokens = self._window_tokens + num_tokens
        self._data_time += data_time

    def log(self, step: int, lr: float, **counters: Any) -> str:
        """Read the recorded tensors, write metrics.jsonl and TensorBoard, and return the console line.

        `counters` are fields of `LoggedStep` that others count: utilization, skipped_records, failed_saves, save_waits.

        The numbers stay in `latest` (host floats, NaN and infinity as they are), for the guards.
        """
        assert self._loss is not None, "log() before any record()"
        assert self._grad_norm is not None
        assert step > self._window_step, "logged twice"
        window_tokens = torch.as_tensor(self._window_tokens)
        scalars = [scalar.to(self._device, torch.float64) for scalar in (self._loss, self._grad_norm, window_tokens)]
        loss, grad_norm, tokens = torch.stack(scalars).tolist()  # the only wait for the device
        now = time.perf_counter()
        steps, seconds = step - self._window_step, now - self._window_start
        tps_per_device = tokens / seconds / self._world_size
        self._tokens_before += int(tokens)
        memory, memory_peak = _memory_gib(self._device)
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
            failed_writes=self._failed_writes,
            **counters,
        )
        values = {name: value for name, value in asdict(self.latest).items() if name not in ("step", "time")}
        self._write(self._file, self.latest.to_json(), "train", values, step)
        self._eta = self._time_left(self.latest, now)
        self._window_tokens, self._data_time = 0, 0.0
        self._window_step, self._window_start = step, now
        return self._line(self.latest)

    def validated(self, step: int, score: dict[str, float]) -> None:
        """Note a validation after `step`: a line of validation.jsonl, and TensorBoard's validation/... ."""
        finite = {name: value if math.isfinite(value) else str(value) for name, value in score.items()}
        line = json.dumps({"step": step, **finite}, allow_nan=False)
        self._write(self._validation_file, line, "validation", score, step)

    def status(self) -> str:
        """What the progress bar shows beside the step: loss, tokens/s, time left. Empty before the first log step."""
        if self.latest is None:
            return ""
        return f"loss {self.latest.loss:.4f}  {self.latest.tps:,.0f} tokens/s  eta {self._eta}"

    def tokens_so_far(self) -> int:
        """Tokens trained on since step 1, to be saved with a checkpoint; reads the device if it did the counting."""
        return self._tokens_before + int(self._window_tokens)

    def close(self) -> None:
        """Flush and close the files."""
        for output in (self._file, self._validation_file, self._tensorboard):
            if output is not None:
                with self._tolerating_a_full_disk():
                    output.close()

    def _write(self, file: TextIO | None, line: str, kind: str, values: Mapping[str, float | None], step: int) -> None:
        if file is not None:
            with self._tolerating_a_full_disk():  # what did not fit stays in the buffer, for the next try
                file.write(line + "\n")
                file.flush()  # whoever follows the file sees the line now, and a killed run keeps it
        if self._tensorboard is not None:
            with self._tolerating_a_full_disk():
                board, self._tensorboard = self._tensorboard, None
                for name, value in values.items():
                    if value is not None:
                        board.add_scalar(f"{kind}/{name}", value, step)
                self._tensorboard = board  # not after a failure: its thread is dead

    @contextmanager
    def _tolerating_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._failed_writes == 0:
                logging.getLogger("titanlite").warning(f"Training goes on, but its metrics cannot be written: {error}")
            self._failed_writes += 1

    def _time_left(self, entry: LoggedStep, now: float) -> timedelta:
        """At the mean pace since the first line, as that one held compilation and warm-up."""
        if self._warm is None:
            self._warm = (entry.step, now)
        warm_step, warm_time = self._warm
        pace = (now - warm_time) / (entry.step - warm_step) if entry.step > warm_step else entry.step_time
        return timedelta(seconds=round(pace * (self._total_steps - entry.step)))

    def _line(self, entry: LoggedStep) -> str:
        width = len(str(self._total_steps))
        mfu = "" if entry.mfu is None else f"mfu {entry.mfu:.1%}  "
        return (
            f"step {entry.step:>{width}}/{self._total_steps}  loss {entry.loss:.4f}  grad_norm {entry.grad_norm:.3f}  "
            f"lr {entry.lr:.2e}  {entry.tps:,.0f} tokens/s  {mfu}{entry.memory:.2f} GiB  eta {self._eta}"
        )


def drop_entries_after(path: Path, step: int) -> None:
    """Remove from a metrics.jsonl what lies after `step`, and lines that a crash left incomplete, atomically.

    Says in the log how many entries went.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    kept = [line for line in lines if (entry_step := _step_of(line)) is not None and entry_step <= step]
    content = "".join(line + "\n" for line in kept)
    if content == text:
        return
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    logging.getLogger("titanlite").info(
        f"{path.name}: dropped {len(lines) - len(kept)} entries of an earlier run after step {step}; "
        "these steps are trained again."
    )


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _memory_gib(device: torch.device) -> tuple[float, float]:
    """The "memory" and "memory_peak" of the table above; on a GPU the peaks start anew."""
    if device.type == "cuda":
        reserved, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return reserved / GIB, allocated / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    statm = Path("/proc/self/statm")
    if not statm.exists():  # outside Linux only the peak is to be had
        return peak / GIB, peak / GIB
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident / GIB, max(peak, resident) / GIB  # the kernel updates its peak a little late
