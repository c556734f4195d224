"""The trainer: builds everything once, then does steps until the end, a signal, or a failure.

Invariant: the step loop waits for the device only when it logs or saves. It has no branch on the layout.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titanlite.checkpoint.go_on import how_to_go_on
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.save import Saver
from titanlite.config.errors import (
    ERROR_FOLDER,
    CheckpointError,
    GuardError,
    StoppedBySignal,
    StoppedUnsaved,
    UserError,
)
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.heldout import ValidationSet
from titanlite.data.loader import Loader, OutOfData
from titanlite.data.tokenizer import load_tokenizer
from titanlite.load_run import check_run, world_size
from titanlite.observe.flops import state_bytes
from titanlite.observe.forecast import GIB, handed_down
from titanlite.observe.guards import check_finite
from titanlite.observe.live import LiveView
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.metrics import MetricsRecorder
from titanlite.observe.profiler import Profiler
from titanlite.optim.norms import ParameterNorms
from titanlite.optim.schedule import learning_rate
from titanlite.parallel.init_weights import check_memory
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.report.run_files import RunFiles
from titanlite.runtime.events import Event
from titanlite.runtime.hang_report import HangWatch, all_hosts, set_timeout
from titanlite.runtime.logging import say_end, setup_logging
from titanlite.runtime.signals import Requests, Signals, end_at_once
from titanlite.runtime.world import process_group
from titanlite.score import Score
from titanlite.train.build import (
    describe,
    environment_of,
    open_checkpoints,
    open_folder,
    say_start,
    start_metrics,
)
from titanlite.train.evaluate import evaluate
from titanlite.train.out_of_memory import explained, is_out_of_memory
from titanlite.train.places import check_countable, counted
from titanlite.train.samples import Sampler
from titanlite.train.starts import Start
from titanlite.train.update import Update


def train(run: Run, argv: Sequence[str] = ()) -> None:
    """Train in the process of this rank. The launcher's environment variables say which rank it is.

    Args:
        argv: The command line of `run`. If the run ends early, the message that tells how to continue quotes it.

    Raises:
        UserError: Something that the user can correct. Its `exit_code` is that of the program.
    """

    def stopped(name: str) -> None:
        say_end(f"Stopped by {name} before there was anything to save.", how_to_go_on(run, argv), "stop")

    with process_group(run.job) as device:
        end_at_once(stopped)
        trainer = None
        try:
            trainer = Trainer(run, device)
            trainer.train()
        except Exception as error:
            if trainer is not None and isinstance(error, GuardError):  # raised on all ranks together
                trainer.close()  # it finishes a save in progress, which is of an earlier step and good
            if trainer is not None or not isinstance(error, UserError):
                error.add_note(how_to_go_on(run, argv))
            if is_out_of_memory(error):
                if trainer is not None:
                    trainer.profiler.out_of_memory()
                when = f"at step {trainer.steps_done}" if trainer is not None else "in the build"
                words = explained(error, run, argv, device, when)
                words.add_note(how_to_go_on(run, argv))
                raise words from None
            raise


class Trainer:
    """Everything that one rank needs for a run. `with Trainer(job) as trainer` closes it at the end.

    Attributes:
        steps_done: Number of optimizer steps since the beginning of the run, including those of earlier starts.
        model: The part of the model on this rank. Its parameters are sharded (DTensor).
        loader: The training data.
    """

    def __init__(self, job: JobConfig | Run, device: torch.device | None = None) -> None:
        """Build and parallelize, and resume from the newest checkpoint if there is one.

        Args:
            job: What to train. A JobConfig is checked first; a Run has been checked already.
            device: The device of this rank, if the caller has started the world with `process_group`. None: the trainer
                starts the world.

        Raises:
            UserError: The job breaks a rule, or the data, the tokenizer or the checkpoint cannot be used.
        """
        self.opened = ExitStack()  # what `close` closes, in reverse order
        try:
            run = job if isinstance(job, Run) else check_run(job, world_size())
            self.build(run, device or self.opened.enter_context(process_group(run.job)))
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error of one rank, the others may wait for it in another collective, so closing together could hang.
        if error is None or (dist.is_initialized() and dist.get_world_size() == 1):
            self.close()

    def build(self, run: Run, device: torch.device) -> None:
        """Build all that the step loop needs. Each part comes after the parts that it needs."""
        self.job, self.folder, self.device, opened = run.job, run.dump_folder, device, self.opened
        check_countable(run, device)
        check_memory(run, state_bytes(run), device)
        self.rank, self.mesh = dist.get_rank(), build_mesh(run.degrees, device.type)
        patience = self.job.comm.init_timeout_seconds
        set_timeout(self.mesh.groups, patience)
        hosts = all_hosts()
        self.watch = HangWatch(os.environ.get(ERROR_FOLDER), self.rank, patience, hosts)
        self.log = setup_logging(self.rank, None).info
        self.run_id, outputs = open_folder(run, self.log, opened)
        tokenizer = load_tokenizer(run.tokenizer_path)
        self.loader = Loader(run, tokenizer, self.mesh.data_rank, self.mesh.data_group, device)
        opened.callback(self.loader.close)
        self.validation = None
        if self.job.validation.freq:
            self.validation = ValidationSet(run, tokenizer, self.mesh.data_rank, device)
        for line in describe(run, device, tokenizer, self.loader, self.validation):
            self.log(line)
        self.plan = handed_down() if self.job.job.plan else None
        if self.plan is not None:
            self.log(Event(self.plan.line(), "plan", planned=self.plan.numbers()))
        self.loader.start()  # its processes start while the model is built; a resume restarts them
        sharded = build_model(run, self.mesh, device, self.log)
        self.update = Update(run, self.mesh, sharded, device)
        self.model, self.optimizer = self.update.model, self.update.optimizer
        details, self.norms = self.job.metrics.details, None
        asked = {name: name in details for name in ("gradients", "updates")}
        if any(asked.values()):
            self.norms = ParameterNorms(self.model, self.optimizer, run.arch, **asked)
        self.casts = None
        if "float8" in details:
            from titanlite.train.float8_casts import Float8Casts  # it and torchao import the compiler, for seconds

            self.casts = Float8Casts(self.model, run, device)
        self.sampler = None
        if self.job.samples.freq:
            self.sampler = Sampler(run, tokenizer, self.mesh, self.update.forward_backward, device)
        self.steps_done = 0
        self.grad_norm: Tensor | None = None
        self.validation_loss = -1, math.inf  # the step of the last validation, and its loss
        self.saver: Saver | None = None
        state, changes = None, []
        if self.job.checkpoint.enable:
            live = LiveState(self.model, self.optimizer)
            self.saver, resumer = open_checkpoints(run, live, tokenizer, self.loader, self.log, opened)
            state = self.resume(resumer.load())
            changes = resumer.changes
            self.saver.loaded_step, self.saver.run = state["step"] if state else None, self.run_id
            if state is not None and self.job.checkpoint.keep_best:
                self.saver.purge()  # a kill may have come between a save and the link to the best
        self.update.precompute_scales()
        self.loader.start()
        environment = environment_of(run, device, self.run_id)
        resumed_step = state["step"] if state else None
        if outputs is not None:
            outputs.start(self.job, environment, resumed_step)
        self.metrics: MetricsRecorder = start_metrics(run, device, environment, state)
        opened.callback(self.metrics.close)
        if outputs is not None:  # after the writers, because one that cannot begin ends this start
            record = Start.of(self.job, environment, hosts, self.loader.sources, tokenizer.fingerprint)
            say_start(outputs, resumed_step, record, changes)
        count = partial(counted, sharded, self.update)
        self.profiler = Profiler(self.job.profiling, self.folder, self.rank, device, self.log, count)
        opened.callback(self.profiler.close)
        opened.callback(self.watch.close)

    def resume(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Continue from the state of a checkpoint whose tensors have been loaded. Returns `state`."""
        if state is not None:
            if "data" in state:
                self.loader.load_state_dict(state["data"])
            self.steps_done, self.run_id = state["step"], state.get("run", self.run_id)
            self.log(f"Resumed after step {self.steps_done}: {state['tokens']:,} tokens seen")
        return state

    def train(self) -> None:
        """Do steps until the last step, the end of the data, or a signal. Then save.

        Raises:
            StoppedBySignal: A signal stopped the run, and it was saved.
            StoppedUnsaved: A signal stopped the run, and checkpoint.enable is false.
            UserError: The data ends before the first step or cannot be read, or there is no step 0 to save.
            CheckpointError: The last save failed.
            GuardError: The loss or the gradient norm is not finite. Nothing was saved.
        """
        job, signals, requests = self.job, Signals(self.mesh.world_group), Requests()
        first_step, finished = self.steps_done, self.steps_done >= job.training.steps
        if job.checkpoint.create_seed_checkpoint:
            if self.saver is None or self.steps_done:
                why = f"the run has come to step {self.steps_done}" if self.steps_done else "checkpoint.enable is false"
                raise UserError(f"checkpoint.create_seed_checkpoint: {why}, so there is no step 0 to save.")
            self.save()
            return self.finish(Requests(), finished=False)
        if finished:
            self.log(f"Nothing to do: step {self.steps_done} is done. Set a larger training.steps to go on.")
        gc.collect()
        gc.disable()
        self.opened.callback(gc.enable)
        with LiveView(lambda: RunFiles(self.folder).read(), self.rank) as view:
            if self.steps_done == 0:
                self.validate()
            failure = self.data_failure()
            signals.agreed(self.data_fails(2))
            while not finished and requests.stop is None and failure is None:
                try:
                    self.step()
                except OutOfData as end:  # on all ranks at the same step
                    if self.steps_done == 0:
                        remedy = "Lower training.global_batch_size or training.seq_len, or raise dataset.max_epochs."
                        raise UserError(f"The data is smaller than one global batch: {end}. {remedy}") from None
                    self.log(f"The data ends after step {self.steps_done}: {end}")
                    break
                if self.steps_done % job.training.gc_freq == 0:
                    gc.collect(1)  # the young generations, because they have the garbage of a step
                logged = self.metrics.is_log_step(self.steps_done)
                view.update(self.steps_done, self.metrics.latest if logged else None)
                # The answer is that of the call one step ago, which asked about the next step. This call asks about the
                # one after the next.
                requests = signals.agreed(self.data_fails(2), logged and self.profiler.is_asked())
                if requests.profile:
                    self.profiler.ask()
                failure = self.data_failure() if requests.data_fails else None
                finished = self.steps_done == job.training.steps
                if not finished:
                    due = requests.save or self.steps_done % job.checkpoint.interval == 0
                    self.save_and_validate(due, self.validates_now())
                    self.sample()
                self.watch.passed(self.steps_done, min(job.comm.train_timeout_seconds, job.checkpoint.timeout_seconds))
                if self.steps_done == first_step + 1:
                    set_timeout(self.mesh.groups, job.comm.train_timeout_seconds)
            # If the data ended right after a validation, that one was the last.
            validated = not finished and self.validates_now()
            finished = view.finished = finished or (requests.stop is None and failure is None)
            trained = self.steps_done > first_step
            validate = requests.stop is None and failure is None and trained and not validated
            self.save_and_validate(failure is None or trained, validate, last=finished)
            if finished and trained and self.steps_done == job.training.steps:
                self.sample()
        signals.wait()
        self.finish(requests, finished, failure)

    def step(self) -> LoggedStep | None:
        """One optimizer step over this rank's part of the global batch.

        Returns:
            What was measured, if this step is logged (metrics.log_freq). Then the host waits for the device.

        Raises:
            OutOfData: The data has no further batch (dataset.max_epochs). All ranks raise it at the same step.
            UserError: A record cannot be read.
            GuardError: The loss or the gradient norm of a step that is logged is not finite.
        """
        with self.profiler.step(self.steps_done + 1):
            return self._step()

    def _step(self) -> LoggedStep | None:
        with self.metrics.timing("data"), record_function("data"):
            batch = self.loader.next_global_batch()
        self.steps_done += 1
        lr = learning_rate(self.steps_done, self.job.optimizer.lr, self.job.lr_scheduler, self.job.training.steps)
        logs = self.metrics.is_log_step(self.steps_done)
        norms = self.norms if logs else None
        # A compiler rounds in other places where it counts, so a resumed run must count in the same steps.
        casts = self.casts if self.steps_done % self.job.metrics.log_freq == 0 else None
        with casts.counting() if casts is not None else nullcontext():
            done = self.update(batch.microbatches, batch.num_valid_tokens, lr, norms)
        self.grad_norm = done.grad_norm
        seconds = {"forward_backward": done.forward_backward_seconds, "optimizer": done.optimizer_seconds}
        self.metrics.record(done.grad_norm, done.num_valid_tokens, seconds)
        if not logs:
            return None  # the loss is not summed over the ranks
        losses = self.losses(done.loss, batch.num_valid_tokens)
        saves = self.saver.stats() if self.saver else {}
        details = {} if norms is None else norms.describe(norms.total().tolist())
        details |= {} if casts is None else casts.describe(casts.total().tolist())
        entry = self.metrics.log(self.steps_done, lr, losses, **saves, **self.loader.stats(), **details)
        check_finite(entry.loss, entry.grad_norm, self.steps_done)
        return entry

    def data_fails(self, steps: int) -> bool:
        """Whether this rank cannot read its data for one of the next `steps` steps. It waits until they have been
        read."""
        with self.metrics.timing("data"):
            return self.loader.fails_within(max(0, min(steps, self.job.training.steps - self.steps_done)))

    def data_failure(self) -> Exception | None:
        """Why some rank cannot read its data for the next step, or None. All ranks get the same answer."""
        failures: list[Exception | None] = [None] * dist.get_world_size()
        own = self.loader.failure() if self.data_fails(1) else None
        dist.all_gather_object(failures, own, self.mesh.world_group)
        return next((failure for failure in failures if failure is not None), None)

    def losses(self, share: Tensor, num_tokens: int) -> Tensor:
        """The loss of the global batch, and the largest of the losses of the data-parallel ranks: (2,) on the device.

        Args:
            share: This rank's share of the loss.
            num_tokens: Number of tokens that have a loss among those that this rank reads.
        """
        # A column for each data-parallel rank. The ranks that share its rows add up to its share and its tokens.
        sums = torch.zeros(2, self.mesh.data_degree, dtype=torch.float64, device=self.device)
        sums[0, self.mesh.data_rank] = share
        sums[1, self.mesh.data_rank] = num_tokens / (self.mesh.degrees.context * self.mesh.degrees.pipeline)
        dist.all_reduce(sums, group=self.mesh.loss_group)
        shares, tokens = sums
        return torch.stack([shares.sum(), (shares * tokens.sum() / tokens.clamp(min=1.0)).max()])

    def validates_now(self) -> bool:
        """Whether a validation is due after the steps that are done (validation.freq)."""
        freq = self.job.validation.freq
        return freq > 0 and self.steps_done % freq == 0

    def save_and_validate(self, save: bool, validate: bool, last: bool = False) -> None:
        """Do what is due. A save comes first, so that nothing is lost meanwhile. With checkpoint.keep_best a validation
        comes first, because its loss is a part of the checkpoint."""
        first = validate and self.job.checkpoint.keep_best
        if first:
            score = self.validate()
            save = save or (score is not None and self.saver is not None and self.saver.improves(score.loss))
        if save:
            self.save(last)
        if validate and not first:
            self.validate()

    def validate(self) -> Score | None:
        """Compute the loss on held-out data, if the job has any, log it and return it."""
        if self.validation is None:
            return None
        evaluation = self.update.forward_backward.evaluate
        score = evaluate(self.validation, evaluation, self.mesh.data_group, self.mesh.loss_group)
        self.metrics.validated(self.steps_done, asdict(score))
        self.log(Event(f"validation after step {self.steps_done}: {score}", "validation", self.steps_done))
        self.validation_loss = self.steps_done, score.loss
        return score

    def sample(self) -> None:
        """Let the model complete the prompts of [samples], if that is due after the steps that are done."""
        if self.sampler is None or self.steps_done % self.job.samples.freq:
            return
        patience = self.job.comm.train_timeout_seconds
        completions = self.sampler.complete(lambda: self.watch.passed(self.steps_done, patience))
        self.metrics.sampled(self.steps_done, [asdict(completion) for completion in completions])
        for completion in completions:
            self.log(f"sample after step {self.steps_done}: {completion.prompt}{completion.completion}")

    def save(self, last: bool = False) -> None:
        """Save what a resume needs. Weights after a non-finite gradient are never saved."""
        if self.grad_norm is not None:
            check_finite(0.0, self.grad_norm.item(), self.steps_done)
        if self.saver is None:
            return
        with self.metrics.timing("checkpoint"):
            state = {"step": self.steps_done, "tokens": self.metrics.tokens_so_far(), "data": self.loader.state_dict()}
            step, loss = self.validation_loss
            if step == self.steps_done and math.isfinite(loss):
                state["validation_loss"] = loss
            self.saver.save(self.steps_done, {**state, "run": self.run_id}, last=last)

    def finish(self, requests: Requests, finished: bool, failure: Exception | None = None) -> None:
        """Close everything. Then raise an exception if the run is not finished.

        Its reason is a stop by a signal, data that could not be read (`failure`), or a last save that failed.
        """
        if self.plan is not None and self.metrics.pace is not None:
            measured = self.plan.compared(self.metrics.memory_peak * GIB, self.metrics.pace)
            self.log(Event(measured, "plan", self.steps_done))
        self.close()
        if failure is not None:
            raise failure
        stopped = f"Stopped by {requests.stop} after step {self.steps_done}"
        if self.saver is not None and not self.saver.holds(self.steps_done):
            raise CheckpointError(
                f"{f'{stopped}. ' if requests.stop else ''}The save after the last step, {self.steps_done}, FAILED; "
                "the log says why. Once that is mended, start again: what the newest checkpoint does not hold is "
                "trained again."
            )
        if requests.stop and not finished:
            if self.saver is None:
                number = signal.Signals[requests.stop]
                raise StoppedUnsaved(f"{stopped}: nothing saved, as checkpoint.enable is false.", number)
            raise StoppedBySignal(f"{stopped}: saved.")
        self.log(Event(f"Finished after step {self.steps_done}.", "finish", self.steps_done))

    def close(self) -> None:
        """Finish all background work and close all files."""
        self.opened.close()
