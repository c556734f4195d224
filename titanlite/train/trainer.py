"""The trainer: builds a run on one rank and trains it step by step.

Invariant: While a step runs on the GPU, the CPU launches the next one. In each step, the CPU waits
only for the previous step, to read whether any rank has a request. It waits for all launched work
when it logs, saves, validates, generates samples or compares replicas. The training loop has no
branches on the layout.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from titanlite.checkpoint.find import resume_hint
from titanlite.config.errors import GuardError, StoppedBySignal, StoppedUnsaved, UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader, OutOfData
from titanlite.data.tokenizer import load_tokenizer
from titanlite.hooks.checkpoints import Checkpointer
from titanlite.hooks.hang_report import HangReport
from titanlite.hooks.hook import Hook, Request
from titanlite.hooks.hook_state import check_hook_names, check_json, hook_states, load_hook_states
from titanlite.hooks.records import Records, lock_folders
from titanlite.hooks.stop_signals import StopSignals
from titanlite.hooks.validation import Validator
from titanlite.load_run import check_run, read_world_size
from titanlite.observe.gpus import check_memory
from titanlite.observe.logged_step import MEASURED_FIELDS, LoggedStep
from titanlite.observe.meter import Meter
from titanlite.observe.outputs import has_line_of_step
from titanlite.optim.build import has_modes, set_mode
from titanlite.optim.schedule import learning_rate_at
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.runtime.logging import LOGGER_NAME, Event, setup_logging
from titanlite.runtime.world import gathered, process_group
from titanlite.score import Score
from titanlite.train.build import describe_run, settle_compute_dtype, standard_hooks
from titanlite.train.out_of_memory import explain_out_of_memory, is_out_of_memory
from titanlite.train.request_exchange import RequestExchange, combine_requests
from titanlite.train.step import StepResult, TrainStep


class Trainer:
    """Trains a model on one rank. Every rank of a distributed run creates a separate `Trainer`.

    Use it as a context manager, which closes files and stops background work at the end:

        with Trainer(job) as trainer:
            trainer.train()

    Attributes:
        run: The validated job, with values derived from the job, such as the parallelism degrees.
        hosts: Host name of each rank, indexed by rank.
        run_id: Random ID of the run. A resumed run keeps the ID stored in its checkpoint.
        steps_done: Number of optimizer steps since the beginning of the run, including the steps
            before a resume.
        resumed: Whether a checkpoint of this run was loaded.
        model: This rank's part of the model. Its parameters are DTensors, or plain tensors on a
            single rank without FSDP; see `needs_fsdp` in titanlite/parallel/fsdp.py.
        loader: Training data.
        checkpointer: Saves and loads checkpoints. None if the run has no checkpoints.
        validator: Computes the validation loss. None if the run has no validation.
        hooks: Records, guards, optional parts of the run, and plugin hooks, in the order in which
            the trainer calls them.
    """

    def __init__(
        self,
        job: JobConfig | Run,
        device: torch.device | None = None,
        hooks: Sequence[Hook] = (),
        *,
        standard: bool = True,
    ) -> None:
        """Build and parallelize the model, and resume from the newest checkpoint if there is one.

        Args:
            job: Job to train. A JobConfig is validated first. A Run has already been validated.
            device: Device of this rank, if you have already entered `process_group`. By default,
                the trainer enters `process_group` and uses its device.
            hooks: Additional hooks, called after the standard hooks.
            standard: Whether to use the standard hooks, such as the guards. If False, there are no
                log files, validation or checkpoints either.

        Raises:
            UserError: If the job is invalid, or the data, tokenizer or checkpoint cannot be used.
        """
        for hook in hooks:
            if not isinstance(hook, Hook):
                raise UserError(
                    f"hooks: {hook!r} is not an instance of Hook. Pass objects such as MyHook()."
                )
        self.steps_done = 0
        self.resumed = False
        self.run_id = ""
        self.hang_report: HangReport | None = None
        self.stop_signals = StopSignals()
        self.checkpointer: Checkpointer | None = None
        self.validator: Validator | None = None
        self._is_closed = False
        self._resources = ExitStack()  # closed in reverse order by `close`
        self._folder_locks = ExitStack()  # on the folders of the run, released after `_resources`
        try:
            run = job if isinstance(job, Run) else check_run(job, read_world_size())
            check_memory(run)
            if device is None:
                # `titanlite train` passes a device. It keeps its signal handlers until the process
                # exits, because a late signal must not replace the exit code.
                self._resources.callback(self.stop_signals.restore_handlers)
                device = self._resources.enter_context(process_group(run.job))
            self._build(run, device, hooks, standard)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _build(
        self, run: Run, device: torch.device, extra_hooks: Sequence[Hook], standard: bool
    ) -> None:
        """Create the mesh, hooks, tokenizer, loader, model and optimizer, and load a checkpoint.

        The process group must exist. The order matters: the hang report starts first to watch the
        build, the output folder is locked before files are written, and `Hook.built` is called
        before the state of hooks is loaded.

        Args:
            run: Validated job.
            device: Device of this rank.
            extra_hooks: Hooks of the caller, called after the standard hooks.
            standard: Whether to add the standard hooks, checkpoints, validation and log files.
        """
        run = settle_compute_dtype(run, device)
        run = run.resolve_attention_backend(on_gpu=device.type == "cuda")
        self.run = run
        self.job = run.job
        self.device = device
        self.rank = dist.get_rank()
        self.mesh = build_mesh(run.degrees, device.type)
        self.hosts = gathered(socket.gethostname())

        self.hooks = self._create_hooks(extra_hooks, standard)
        self.tokenizer = load_tokenizer(run.tokenizer_path, run.job)
        self._create_loader()

        sharded_model = build_model(run, self.mesh, device, self.log)
        self.train_step = TrainStep(run, self.mesh, sharded_model, device)
        self.model = self.train_step.model
        self.optimizer = self.train_step.optimizer
        self.forward_backward = self.train_step.forward_backward
        self.meter = Meter(run, device)

        if self.checkpointer is not None:
            # Close it before the other hooks, which it notifies when the last save is complete.
            self._resources.callback(self.checkpointer.close)
        if standard and self.job.validation.freq:
            self.validator = Validator(self)
        for hook in self.hooks:
            hook.built(self)
        with self.evaluation_mode():  # checkpoints contain the weights for evaluation
            self.load_checkpoint()
        self.train_step.precompute_scales()

        self.loader.start()  # again, because the checkpoint may have changed the data position
        self.meter.start(self.steps_done)
        for hook in self.hooks:
            hook.started(self.steps_done)

    def _create_output_hooks(self) -> list[Hook]:
        """Lock the output folder, open the log files, and create the hang report and the records.

        Call this before the checkpointer and the standard hooks are created, because they use the
        log files. All ranks must call this together, because they communicate to lock the output
        folder.
        """
        setup_logging(self.rank, None)
        self.hang_report = HangReport(self)  # first, so that it covers the rest of the build
        self._resources.callback(self.hang_report.close)  # also if the lock fails
        # Lock the output folder before the records write to it.
        self.run_id = lock_folders(self.run, self.log, self._folder_locks)
        return [self.hang_report, Records(self)]

    def _create_hooks(self, extra_hooks: Sequence[Hook], standard: bool) -> list[Hook]:
        """Create all hooks of the run, in the order in which the trainer calls them.

        Args:
            extra_hooks: Hooks of the caller, which follow the standard hooks.
            standard: Whether to create the standard hooks.
        """
        hooks: list[Hook] = []
        if standard:
            hooks.append(self.stop_signals)
            hooks += self._create_output_hooks()
            if self.job.checkpoint.enable:
                self.checkpointer = Checkpointer(self)
                hooks.append(self.checkpointer)
            hooks += standard_hooks(self.run)
        hooks.extend(extra_hooks)

        check_hook_names(hooks)
        # Resources close in reverse order, so hooks are closed before the files that they use.
        for hook in hooks:
            self._resources.callback(hook.close)
        return hooks

    def _create_loader(self) -> None:
        """Create the loader of the training data, describe the run in the log, and read ahead.

        Call this before the model is built, so that the data workers read in the meantime.
        """
        self.loader = Loader(
            self.run,
            self.tokenizer,
            self.mesh.data_rank,
            self.mesh.data_group,
            self.device,
            is_stopping=lambda: bool(self.stop_signals.stop_signal),
        )
        self._resources.callback(self.loader.close)
        for line in describe_run(self.run, self.device, self.tokenizer, self.loader, self.rank):
            self.log(line)
        self.loader.start()

    def load_checkpoint(self) -> None:
        """Load the newest checkpoint of the run, or else `checkpoint.initial_load_path`.

        If neither exists, the weights stay randomly initialized. To start from other weights,
        override this method. Call `super().load_checkpoint()` first, because it prepares saving and
        resumes the run, and load your weights only if `steps_done` is still 0.
        """
        if self.checkpointer is not None:
            self.checkpointer.load()

    def train(self) -> None:
        """Train until the last step, the end of the data, a stop signal or a `finish` request.

        Validate and save as the job requires, save a final checkpoint, and close the trainer.

        Raises:
            StoppedBySignal: If a signal stopped the run and a checkpoint was saved.
            StoppedUnsaved: If a signal stopped the run and checkpoint.enable is false.
            UserError: If the trainer is closed, or the data ends before the first step or cannot be
                read.
            CheckpointError: If the last save failed.
            GuardError: If a guard stopped the run. The failed step was not saved.
        """
        self._check_is_open()
        try:
            self._train()
        except BaseException as error:
            if isinstance(error, UserError):
                error.step = self.steps_done  # for the report of the error
            for hook in self.hooks:
                hook.failed(error)
            raise

    def _train(self) -> None:
        """Run the training loop, save and validate the last step, and close the trainer.

        Unlike `train`, this does not call `Hook.failed` if an exception is raised.
        """
        first_step = self.steps_done
        if first_step >= self.job.training.steps:
            self.log(
                f"Nothing to do: step {first_step} is done. "
                "Set a larger training.steps to continue."
            )
            # Continue: the loop trains no step, but the hooks still begin and end as usual.

        for hook in self.hooks:
            hook.train_begins(first_step)
        if first_step == 0 or self._is_validation_missing():
            self.validate()

        loop_end = self._run_steps()

        # Usually, save and validate the last step.
        has_trained = self.steps_done > first_step
        last_actions = self._choose_last_actions(loop_end, has_trained)
        self._take_actions(last_actions)

        self._end_run(loop_end)  # closes the trainer, and raises the error that ended the run

    def _run_steps(self) -> _LoopEnd:
        """Train until the last step, a request to end the run, or a data error.

        After each step except the last one, take the actions, such as a save, that any rank has
        requested. All ranks must call this together.

        Returns:
            Why the loop ended, with the actions requested after the last step, which the caller
            must take.

        Raises:
            UserError: If the data ends before the first step.
        """
        exchange = RequestExchange(self._collect_request, self.device)
        end = self._find_end_before_first_step()
        while end is None:
            has_request = exchange.collect_next(self.steps_done + 1)
            self.step(has_request=has_request)
            # The step has counted the ranks with a request. If there are none, nothing is gathered.
            request_of_all_ranks = exchange.receive(self._num_ranks_with_request)

            end = self._find_end(request_of_all_ranks)
            if end is None:
                self._take_actions(request_of_all_ranks)
        return end

    def _find_end_before_first_step(self) -> _LoopEnd | None:
        """Return why training ends before its first step, or None if it can start.

        Training ends if all steps are done, if a rank has received a stop signal, or if a rank
        cannot read its data. All ranks must call this together.

        Raises:
            UserError: If the data ends before the first step.
        """
        data_error = self._try_to_read_ahead(self.steps_done + 1)
        request = Request(stop=self.stop_signals.stop_signal, data_fails=data_error is not None)
        return self._find_end(combine_requests(request))

    def step(self, has_request: bool = False) -> LoggedStep | None:
        """Run one optimizer step on this rank's part of the global batch.

        Args:
            has_request: Whether this rank requests an action of all ranks, such as a save. The step
                counts the ranks with a request.

        Returns:
            The metrics if this step is logged (metrics.log_freq), or None. Logging synchronizes
            with the GPU.

        Raises:
            OutOfData: If there is no further batch (dataset.max_epochs). All ranks raise it at the
                same step.
            UserError: If the trainer is closed, all steps are done, a record cannot be read, or the
                learning rate is invalid.
            GuardError: If a guard stops the run at a log step.
        """
        self._check_is_open()
        step = self.steps_done + 1
        num_steps = self.job.training.steps
        if step > num_steps:
            raise UserError(
                f"All {num_steps} steps are done. Set a larger training.steps to continue."
            )
        lr = learning_rate_at(self.job, step)

        for hook in self.hooks:
            hook.before_step(step)
        with self.meter.timing("data"), record_function("data"):
            batch = self.loader.next_global_batch()
        self.steps_done = step

        # Launch the step. On a GPU, its results are not computed yet when the call returns.
        result = self.train_step(
            batch.microbatches,
            batch.num_valid_tokens,
            lr,
            self.hooks,
            step,
            has_request=has_request,
        )
        self._num_ranks_with_request = result.num_requests  # for `_run_steps`
        self.meter.record(result.grad_norm, result.num_valid_tokens, result.seconds)
        for hook in self.hooks:
            hook.after_step(step, result)

        if not self.meter.is_log_step(step):
            return None
        return self._log_step(lr, result, batch.num_valid_tokens)

    def _log_step(self, lr: float, result: StepResult, local_tokens: int) -> LoggedStep:
        """Collect the metrics since the previous log step, log them, and pass them to the hooks.

        This reads values from the GPU, so the CPU waits until the step is complete.

        Args:
            lr: Learning rate of the step.
            result: Results of the step.
            local_tokens: Number of valid labels in this rank's sequences.
        """
        step = self.steps_done
        losses = self._reduce_losses(result.loss, local_tokens)

        metrics = self.loader.stats()
        for hook in self.hooks:
            metrics |= _read_numbers(hook, step)
        entry = self.meter.read(step, lr, losses, **metrics)

        for hook in self.hooks:
            hook.logged(entry)
        return entry

    def _take_actions(self, request: Request) -> None:
        """Check the completed step, and take the requested actions: save, validate, run hooks.

        The guards check the step first, so a step that a guard rejects is never saved.

        Args:
            request: Combined requests of all ranks, so all ranks take the same actions.
        """
        step = self.steps_done
        for hook in self.hooks:
            hook.check(step, request)

        # Usually save first, so that an interruption during validation loses no step. With
        # keep_best, validate first, because the validation loss decides whether to save the step.
        validates_first = self.job.checkpoint.keep_best
        if request.validate and validates_first:
            self.validate()
        self._save_if_due(request)
        if request.validate and not validates_first:
            self.validate()

        for hook in self.hooks:
            hook.act(step, request)

    def _save_if_due(self, request: Request) -> None:
        """Save the completed step if a rank has requested it or the checkpointer requires it.

        The checkpointer requires a save after a rollback, for example.

        Args:
            request: Combined requests of all ranks.
        """
        is_due = self.checkpointer is not None and self.checkpointer.is_due(self.steps_done)
        if request.save or is_due:
            self.save(is_last=request.last)

    def validate(self) -> Score | None:
        """Compute the validation loss of the current weights, and log it.

        Returns:
            The score, or None if the job has no validation (validation.freq = 0).

        Raises:
            UserError: If the trainer is closed.
        """
        self._check_is_open()
        if self.validator is None:
            return None
        step = self.steps_done
        with self.evaluation_mode():
            score = self.validator.compute_score()
            for hook in self.hooks:
                hook.validated(step, asdict(score))
        self.log(Event(f"Validation after step {step}: {score}", "validation", step))
        return score

    def _is_validation_missing(self) -> bool:
        """Return whether the validation of the current step is due but not in validation.jsonl.

        All ranks must call this together.
        """
        is_due = self.validator is not None and self.steps_done % self.job.validation.freq == 0
        return is_due and not self.has_recorded("validation.jsonl")

    def has_recorded(self, file_name: str) -> bool:
        """Return whether validation results or samples of the current step have been recorded.

        After a resume, they are missing if the run was killed between saving the step and
        validating or sampling. All ranks must call this together.

        Args:
            file_name: File to search for the step, "validation.jsonl" or "samples.jsonl".
        """
        path = self.run.dump_folder / file_name
        # The folder may exist only on the node of rank 0, which writes to it.
        has_line = self.rank == 0 and has_line_of_step(path, self.steps_done)
        return any(gathered(has_line))

    def save(self, is_last: bool = False) -> None:
        """Save a checkpoint of the current step. Do nothing if the run has no checkpoints.

        Args:
            is_last: Whether the run ends here. If so, also write the outputs that the options
                checkpoint.last_save_* select, such as a Hugging Face export.

        Raises:
            UserError: If the trainer is closed.
            GuardError: If a guard prevents the save, because too many steps were skipped in a row,
                or because weights are NaN or infinite.
        """
        self._check_is_open()
        if self.checkpointer is None:
            return
        with self.evaluation_mode():
            for hook in self.hooks:
                hook.saving(self.steps_done)  # a guard can raise an error here
            with self.meter.timing("checkpoint"):
                self.checkpointer.save(self.steps_done, is_last)

    def report_progress(self) -> None:
        """Restart the time limit after which `HangReport` reports that this rank hangs.

        Call this every few seconds during long work between steps. Otherwise, work that takes
        almost as long as the timeout of collectives is reported as a hang.
        """
        if self.hang_report is not None:
            self.hang_report.restart()

    def log(self, line: str | Event) -> None:
        """Log a line at level INFO. The ranks in LOG_RANK, by default rank 0, print it.

        Rank 0 also writes it to train.log and, if it is an `Event`, to events.jsonl.
        """
        logging.getLogger(LOGGER_NAME).info(line)

    def warn(self, line: str) -> None:
        """Log a line at level WARNING."""
        logging.getLogger(LOGGER_NAME).warning(line)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Use the evaluation weights of a schedule-free optimizer during the `with` block.

        Schedule-free optimizers keep two versions of the weights: one for training, and one for
        evaluating and saving. With any other optimizer, this context manager does nothing.
        """
        if not has_modes(self.optimizer):
            yield
            return

        set_mode(self.optimizer, "eval")
        self.train_step.precompute_scales()
        try:
            yield
        finally:
            set_mode(self.optimizer, "train")
            self.train_step.precompute_scales()

    def state_dict(self) -> dict[str, Any]:
        """Return the training state that is not a tensor, for the manifest of a checkpoint.

        All ranks must call this together.

        Returns:
            A small JSON value, the same on all ranks: "step", "tokens" (trained so far), "data"
            (data position), "run" (run ID), and "hooks" (state of each hook by name).
        """
        return {
            "step": self.steps_done,
            "tokens": self.meter.tokens_so_far(),
            "data": self.loader.state_dict(),
            "run": self.run_id,
            "hooks": hook_states(self.hooks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned, when a run resumes.

        Args:
            state: State from the checkpoint, possibly without the keys that
                checkpoint.exclude_from_loading names. Without "data", the data starts from the
                beginning. Without "hooks", the hooks start without state.
        """
        self.steps_done = state["step"]
        self.resumed = True
        self.run_id = state.get("run", self.run_id)
        self.meter.tokens = state["tokens"]
        if "data" in state:
            self.loader.load_state_dict(state["data"])
        load_hook_states(self.hooks, state.get("hooks", {}))

    def close(self) -> None:
        """Close all files, and wait for or stop background work such as data workers and saves.

        If this trainer has created the process group, also destroy it, and restore signal handlers
        and settings of torch. A second call does nothing.
        """
        self._is_closed = True
        with self._folder_locks:
            self._resources.close()

    def _check_is_open(self) -> None:
        """Raise a UserError if the trainer is closed."""
        if self._is_closed:
            raise UserError("This Trainer is closed. Create a new Trainer to continue.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error on this rank, other ranks may wait in a different collective, so closing
        # could hang.
        if error is None or (dist.is_initialized() and dist.get_world_size() == 1):
            self.close()

    def _collect_request(self, step: int) -> Request:
        """Return the actions, such as a save, that this rank wants all ranks to take after `step`.

        Call this only once for each step, because some hooks request an action only once, such as a
        save after SIGUSR2.
        """
        if step > self.job.training.steps:
            return Request()  # the run ends before this step

        # If a rank cannot read the data of the next step (if any), all ranks stop after `step`.
        data_error = self._try_to_read_ahead(step + 1)

        should_save = self.checkpointer is not None and step % self.job.checkpoint.interval == 0
        should_validate = self.validator is not None and step % self.job.validation.freq == 0
        request = Request(
            save=should_save, validate=should_validate, data_fails=data_error is not None
        )
        for hook in self.hooks:
            request |= hook.wants(step)
        return request

    def _try_to_read_ahead(self, step: int) -> Exception | None:
        """Wait until this rank has read the data up to `step`, or up to the last step of the run.

        Errors are returned, not raised.

        Returns:
            The first error while reading the data, such as `OutOfData`, or None. If a stop signal
            arrives during the wait, the result is an `Interrupted` error.
        """
        last_step = min(step, self.job.training.steps)
        num_steps = max(0, last_step - self.steps_done)
        with self.meter.timing("data"):
            return self.loader.prefetch(num_steps)

    def _find_end(self, request: Request) -> _LoopEnd | None:
        """Return why training ends now, or None if it continues.

        All ranks must call this together, and all get the same result.

        Args:
            request: Combined requests of all ranks after the step that has just been completed.

        Raises:
            UserError: If the data ends before the first step.
        """
        is_complete = self.steps_done >= self.job.training.steps
        if is_complete or request.finish:
            return _LoopEnd(request, has_finished=True)
        if request.stop:
            return _LoopEnd(request, has_finished=False)
        if request.data_fails:
            return self._find_data_end(request)
        return None

    def _find_data_end(self, request: Request) -> _LoopEnd | None:
        """Return why training ends after a rank has failed to read its data, or None to continue.

        First, try again to read the data of the next step. Training continues if all ranks succeed
        now, for example because a hook has moved the data position back. All ranks must call this
        together.

        Args:
            request: Combined requests of all ranks.

        Raises:
            UserError: If the data ends before the first step.
        """
        error = self._try_to_read_ahead(self.steps_done + 1)
        data_error = _find_first_error(gathered(error))
        if data_error is None:
            return None
        if not isinstance(data_error, OutOfData):
            return _LoopEnd(request, has_finished=False, data_error=data_error)

        if self.steps_done == 0:
            raise UserError(
                f"The data is smaller than one global batch: {data_error}. "
                "Lower training.global_batch_size or training.seq_len, or raise max_epochs of the "
                "source."
            )
        # The end of the data is no error: the run has finished early.
        self.log(f"The data ends after step {self.steps_done}: {data_error}")
        return _LoopEnd(request, has_finished=True)

    def _reduce_losses(self, loss: Tensor, local_tokens: int) -> Tensor:
        """Compute the global mean loss, and the highest mean loss of any data-parallel rank.

        All ranks must call this together.

        Args:
            loss: This rank's part of the loss: the sum over its tokens, divided by the number of
                valid labels in the global batch.
            local_tokens: Number of valid labels in this rank's sequences.

        Returns:
            Both losses, shape (2,), on the device.
        """
        # Both have shape (number of data-parallel ranks,).
        loss_parts, num_tokens = self._sum_losses_by_data_rank(loss, local_tokens)
        global_loss = loss_parts.sum()

        # Each part was divided by the number of tokens in the global batch. Undo this division.
        loss_sums = loss_parts * num_tokens.sum()
        mean_losses = loss_sums / num_tokens.clamp(min=1.0)  # 0 for a rank without tokens
        return torch.stack([global_loss, mean_losses.max()])

    def _sum_losses_by_data_rank(self, loss: Tensor, local_tokens: int) -> Tensor:
        """Compute the loss and the number of valid labels of each data-parallel rank.

        Context and pipeline parallel ranks with the same data rank train on the same sequences.
        Each of them has a different part of the loss, but they all count the same labels. All ranks
        must call this together.

        Args:
            loss: This rank's part of the loss.
            local_tokens: Number of valid labels in this rank's sequences.

        Returns:
            Losses (row 0) and numbers of valid labels (row 1) of each data-parallel rank, shape
            (2, number of data-parallel ranks), float64, on the device.
        """
        degrees = self.mesh.degrees
        data_rank = self.mesh.data_rank
        num_sharing_ranks = degrees.context * degrees.pipeline

        # Each rank fills in the column of its data rank.
        sums = torch.zeros(2, degrees.data, dtype=torch.float64, device=self.device)
        sums[0, data_rank] = loss
        # For example, if 2 ranks share sequences with 4096 labels, each of them adds 2048.
        # Assigning a number to a GPU tensor is a host sync, but this runs only in log steps.
        sums[1, data_rank] = local_tokens / num_sharing_ranks

        # Tensor parallel ranks compute the same loss, so the group contains only one of them.
        dist.all_reduce(sums, group=self.mesh.loss_group)
        return sums

    def _choose_last_actions(self, end: _LoopEnd, has_trained: bool) -> Request:
        """Return the actions to take after the last step: usually a save and a validation.

        Requests for other actions are kept. All ranks must call this together.

        Args:
            end: Why the training loop ended.
            has_trained: Whether any step was trained since this process started.
        """
        request = end.request
        has_data_error = end.data_error is not None
        has_stop_signal = request.stop != 0

        # Save even without new weights, because the options for the last save, such as a Hugging
        # Face export, may be new. Save nothing if the data of the first step cannot be read.
        should_save = has_trained or not has_data_error

        # If the run has to end soon, validate only if a validation is due. Otherwise, also validate
        # if the last step has no validation result yet.
        should_validate = request.validate
        must_end_soon = has_data_error or (has_stop_signal and not end.has_finished)
        if not must_end_soon:
            is_validated = self.has_recorded("validation.jsonl")
            should_validate = request.validate or not is_validated

        return request._replace(save=should_save, validate=should_validate, last=end.has_finished)

    def _end_run(self, end: _LoopEnd) -> None:
        """End all hooks and close the trainer. Then log that the run has finished.

        If an error or a signal ended the run, raise an exception instead of logging.

        Raises:
            Exception: The error of the training data, or else the first error of a hook.
            CheckpointError: If the last save failed.
            StoppedBySignal: If a signal stopped the run before its last step and a checkpoint was
                saved.
            StoppedUnsaved: If a signal stopped the run and checkpoint.enable is false.
        """
        error = self._end_hooks(end)

        self._is_closed = True
        # Unlock the output folder last, so that the next run cannot write to the log before this
        # run has logged its end.
        with self._folder_locks:
            self._resources.close()
            if error is not None:
                raise error
            self._log_finish(reason=end.request.finish)

    def _end_hooks(self, end: _LoopEnd) -> Exception | None:
        """Call `Hook.ended` of all hooks, wait for the last save, and return the error to raise.

        Returns:
            The first error among these, in this order: the error of the training data, errors of
            hooks, and the error for a stop signal. None if there is no error.
        """
        stop_message = self._describe_stop(end.request.stop)
        # In reverse order, so that the checkpointer comes last and waits for the last save.
        hook_errors = [hook.ended(self.steps_done, stop_message) for hook in reversed(self.hooks)]
        stop_error = self._create_stop_error(end, stop_message)
        return _find_first_error([end.data_error, *hook_errors, stop_error])

    def _log_finish(self, reason: str) -> None:
        """Log that the run has finished.

        Args:
            reason: Why a hook has finished the run early, or "".
        """
        step = self.steps_done
        ending = f": {reason}" if reason else "."
        self.log(Event(f"Finished after step {step}{ending}", "finish", step))

    def _describe_stop(self, signal_number: int) -> str:
        """Return a message such as "Stopped by SIGTERM after step 12", or "" without a signal.

        Args:
            signal_number: Number of the signal that stopped the run, or 0.
        """
        if signal_number == 0:
            return ""
        signal_name = signal.Signals(signal_number).name
        return f"Stopped by {signal_name} after step {self.steps_done}"

    def _create_stop_error(self, end: _LoopEnd, stop_message: str) -> UserError | None:
        """Create the error that ends a run after a stop signal and reports whether it was saved.

        Args:
            end: Why the training loop ended.
            stop_message: Start of the error message, such as "Stopped by SIGTERM after step 12", or
                "" without a signal.

        Returns:
            The error, or None if no signal was received or the run has finished, so that there is
            nothing to resume.
        """
        if not stop_message or end.has_finished:
            return None
        if self.job.checkpoint.enable:
            return StoppedBySignal(f"{stop_message}: saved.")
        message = f"{stop_message}: nothing saved, as checkpoint.enable is false."
        return StoppedUnsaved(message, end.request.stop)


class _LoopEnd(NamedTuple):
    """Why the training loop ended.

    Attributes:
        request: Combined requests of all ranks after the last step.
        has_finished: Whether there is nothing to resume, because the run has completed all steps,
            its data has ended, or a hook has requested to finish it.
        data_error: Error of the first rank that cannot read its data, or None.
    """

    request: Request
    has_finished: bool
    data_error: Exception | None = None


def _find_first_error(errors: Iterable[Exception | None]) -> Exception | None:
    """Return the first exception, or None if there are only None values."""
    return next((error for error in errors if error is not None), None)


def _read_numbers(hook: Hook, step: int) -> Mapping[str, Any]:
    """Return the metrics that a hook adds to a log step.

    Raises:
        UserError: If the hook returns a metric that titanlite measures itself, such as "loss", or a
            value that metrics.jsonl cannot contain.
    """
    numbers = hook.numbers(step)
    check_json(hook, "numbers", dict(numbers))
    for name in numbers:
        if name in MEASURED_FIELDS:
            raise UserError(
                f"The hook {hook.name or type(hook).__name__} returns the metric {name!r} from "
                "`numbers`, but titanlite measures this metric itself. Choose another name."
            )
    return numbers


def train(run: Run, argv: Sequence[str] = ()) -> None:
    """Run a training job on this rank, from building the model to the last checkpoint.

    Call this once in each process. The environment variables of the launcher or torchrun (RANK,
    WORLD_SIZE, ...) identify the rank.

    Args:
        run: Validated job.
        argv: Command line of the run, used in errors to show the command that resumes it.

    Raises:
        UserError: If the run ends for a reason that the user can correct. Its `exit_code` is the
            exit code of the program.
    """
    with process_group(run.job, ends_process=True) as device, _raising_for_sys_exit(run, argv):
        trainer = None
        try:
            trainer = Trainer(run, device)
            trainer.train()  # also closes the trainer
        except Exception as error:
            if is_out_of_memory(error):
                when = "in the build" if trainer is None else f"at step {trainer.steps_done}"
                raise explain_out_of_memory(error, run, argv, device, when) from None

            # A guard stops all ranks together, so they can complete a save in progress. After other
            # errors, closing could hang, because other ranks may wait in a collective.
            if trainer is not None and isinstance(error, GuardError):
                trainer.close()

            # Show the command that resumes the run. After a rejected build, it would fail again.
            is_rejected_build = trainer is None and isinstance(error, UserError)
            if not is_rejected_build:
                error.add_note(resume_hint(run, argv))
            raise


@contextmanager
def _raising_for_sys_exit(run: Run, argv: Sequence[str]) -> Iterator[None]:
    """Raise a RuntimeError if the `with` block calls `sys.exit`, for example in a plugin."""
    try:
        yield
    except SystemExit as error:
        exit_call = RuntimeError(
            f"sys.exit({error.code!r}) was called during training. "
            'To end a run early, return Request(finish="reason") from Hook.wants.'
        )
        exit_call.add_note(resume_hint(run, argv))
        raise exit_call from error
