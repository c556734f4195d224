"""The trainer: builds everything once, then does steps until the end, a signal, or a failure.

Invariant: the step loop waits for the device only when it logs or saves. It knows hooks and nothing of what they do,
and has no branch on the layout.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

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
from titanlite.hooks.checkpoints import Checkpoints
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.hooks.validation import Validation
from titanlite.load_run import check_run, world_size
from titanlite.observe.gpus import check_memory
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.meter import Meter
from titanlite.optim.schedule import rate_of
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.runtime.logging import Event
from titanlite.runtime.world import gathered, process_group
from titanlite.score import Score
from titanlite.train.build import describe, standard_hooks
from titanlite.train.out_of_memory import explained, is_out_of_memory
from titanlite.train.step import TrainStep


def train(run: Run, argv: Sequence[str] = ()) -> None:
    """Train in the process of this rank. The launcher's environment variables say which rank it is.

    Args:
        argv: The command line of `run`. If the run ends early, the message that tells how to continue quotes it.

    Raises:
        UserError: Something that the user can correct. Its `exit_code` is that of the program.
    """
    with process_group(run.job) as device:
        trainer = None
        try:
            trainer = Trainer(run, device)
            trainer.train()
        except Exception as error:
            if trainer is not None and isinstance(error, GuardError):  # raised on all ranks together
                trainer.close()  # it finishes a save in progress, which is of an earlier step and good
            if is_out_of_memory(error):
                when = f"at step {trainer.steps_done}" if trainer is not None else "in the build"
                words = explained(error, run, argv, device, when)
                words.add_note(resume_hint(run, argv))
                raise words from None
            if trainer is not None or not isinstance(error, UserError):
                error.add_note(resume_hint(run, argv))
            raise


class Trainer(Training):
    """Everything that one rank needs for a run. `with Trainer(job) as trainer` closes it at the end.

    Attributes:
        steps_done: Number of optimizer steps since the beginning of the run, including those of earlier starts.
        model: The part of the model on this rank. Its parameters are sharded (DTensor).
        loader: The training data.
    """

    def __init__(
        self,
        job: JobConfig | Run,
        device: torch.device | None = None,
        hooks: Sequence[Hook] = (),
        *,
        standard: bool = True,
    ) -> None:
        """Build and parallelize, and resume from the newest checkpoint if there is one.

        Args:
            job: What to train. A JobConfig is checked first; a Run has been checked already.
            device: The device of this rank, if the caller has started the world with `process_group`. None: the trainer
                starts the world.
            hooks: Hooks of one's own, which are called after the standard ones.
            standard: False: without the standard hooks nothing is written, saved or resumed.

        Raises:
            UserError: The job breaks a rule, or the data, the tokenizer or the checkpoint cannot be used.
        """
        super().__init__()
        try:
            run = job if isinstance(job, Run) else check_run(job, world_size())
            check_memory(run)
            self.build(run, device or self.opened.enter_context(process_group(run.job)), hooks, standard)
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

    def build(self, run: Run, device: torch.device, hooks: Sequence[Hook], standard: bool) -> None:
        """Build all that the step loop needs. Each part comes after the parts that it needs."""
        self.run, self.job, self.device, self.rank = run, run.job, device, dist.get_rank()
        self.mesh, self.hosts = build_mesh(run.degrees, device.type), gathered(socket.gethostname())
        self.hooks = [*(standard_hooks(self) if standard else ()), *hooks]
        self.tokenizer = load_tokenizer(run.tokenizer_path, run.job)
        ranks = self.mesh.data_rank, self.mesh.data_group
        self.loader = Loader(run, self.tokenizer, *ranks, device, lambda: bool(self._stopping()))
        self.opened.callback(self.loader.close)
        for line in describe(run, device, self.tokenizer, self.loader, self.rank):
            self.log(line)
        self.loader.start()  # its processes start while the model is built; a resume restarts them
        self.train_step = TrainStep(run, self.mesh, build_model(run, self.mesh, device, self.log), device)
        self.model, self.optimizer = self.train_step.model, self.train_step.optimizer
        self.forward_backward = self.train_step.forward_backward
        self.meter = Meter(run, device)
        self.tell(Hook.built, self)
        self.tell(Hook.load)
        self.train_step.precompute_scales()
        self.loader.start()
        self.meter.start(self.steps_done)
        self.tell(Hook.started, self.steps_done)

    def train(self) -> None:
        """Do steps until the last step, the end of the data, or a signal. Then save.

        Raises:
            StoppedBySignal: A signal stopped the run, and it was saved.
            StoppedUnsaved: A signal stopped the run, and checkpoint.enable is false.
            UserError: The data ends before the first step or cannot be read.
            CheckpointError: The last save failed.
            GuardError: A guard stops the run (see [guards]). Nothing was saved since.
        """
        try:
            self._train()
        except BaseException as error:
            self.tell(Hook.failed, error)
            raise

    def _train(self) -> None:
        first, steps = self.steps_done, self.job.training.steps
        if first >= steps:
            self.log(f"Nothing to do: step {first} is done. Set a larger training.steps to go on.")
        self.tell(Hook.train_begins, first)
        if first == 0:
            self.validate()
        failure, group = None, self.mesh.world_group
        # Before its first step a start looks at its data.
        asked = exchange(Request(data_fails=self._data_fails(1) is not None, stop=self._stopping()), group)()
        while self.steps_done < steps and not asked.stop:
            if asked.data_fails and (failure := self._data_failure()) is not None:
                break
            receive = exchange(self._wants(), group)  # it overlaps with the step
            self.step()
            asked = receive()
            if self.steps_done < steps:
                self.tell(Hook.act, self.steps_done, asked)
            else:
                asked = asked._replace(validate=False)  # it comes below
        if isinstance(failure, OutOfData):
            if self.steps_done == 0:
                remedy = "Lower training.global_batch_size or training.seq_len, or raise dataset.max_epochs."
                raise UserError(f"The data is smaller than one global batch: {failure}. {remedy}")
            self.log(f"The data ends after step {self.steps_done}: {failure}")
            steps, failure = self.steps_done, None
        finished, trained = self.steps_done >= steps, self.steps_done > first
        validate = trained and not asked.validate and not asked.stop and failure is None
        last = Request(save=failure is None or trained, validate=validate, last=finished)
        self.tell(Hook.act, self.steps_done, last)
        self._finish(asked.stop, finished, failure)

    def step(self) -> LoggedStep | None:
        """One optimizer step over this rank's part of the global batch.

        Returns:
            What was measured, if this step is logged (metrics.log_freq). Then the host waits for the device.

        Raises:
            OutOfData: The data has no further batch (dataset.max_epochs). All ranks raise it at the same step.
            UserError: A record cannot be read.
            GuardError: A guard stops the run, in a step that is logged.
        """
        step = self.steps_done + 1
        self.tell(Hook.before_step, step)
        with self.meter.timing("data"), record_function("data"):
            batch = self.loader.next_global_batch()
        self.steps_done = step
        lr = rate_of(self.job, step)
        result = self.train_step(batch.microbatches, batch.num_valid_tokens, lr, self.hooks, step)
        self.meter.record(result.grad_norm, result.num_valid_tokens, result.seconds)
        self.tell(Hook.after_step, step, result)
        if not self.meter.is_log_step(step):
            return None  # the loss is not summed over the ranks
        losses = self._losses(result.loss, batch.num_valid_tokens)
        more = self.loader.stats()
        for hook in self.hooks:
            more |= hook.numbers(step)
        entry = self.meter.read(step, lr, losses, **more)
        self.tell(Hook.logged, entry)
        return entry

    def validate(self) -> Score | None:
        """Compute the loss on held-out data, if the job has any, log it and return it."""
        found = next((hook for hook in self.hooks if isinstance(hook, Validation)), None)
        return None if found is None else found.validate(self.steps_done)

    def save(self) -> None:
        """Save what a resume needs. Weights after a non-finite gradient are never saved."""
        for hook in self.hooks:
            if isinstance(hook, Checkpoints):
                hook.act(self.steps_done, Request(save=True))

    def close(self) -> None:
        """Finish all background work and close all files."""
        self.opened.close()

    def _wants(self) -> Request:
        """What this rank asks for after the next step."""
        asked = Request(data_fails=self._data_fails(2) is not None)
        for hook in self.hooks:
            asked |= hook.wants(self.steps_done + 1)
        return asked

    def _data_fails(self, steps: int) -> Exception | None:
        """Why this rank cannot read its data for one of the next `steps` steps. It waits until they have been read, or
        a signal asks it to stop."""
        with self.meter.timing("data"):
            return self.loader.failure(max(0, min(steps, self.job.training.steps - self.steps_done)))

    def _stopping(self) -> int:
        return max((hook.stopping() for hook in self.hooks), default=0)

    def _data_failure(self) -> Exception | None:
        """Why some rank cannot read its data for the next step, or None. All ranks get the same answer."""
        failures = gathered(self._data_fails(1), self.mesh.world_group)
        return next((failure for failure in failures if failure is not None), None)

    def _losses(self, share: Tensor, num_tokens: int) -> Tensor:
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

    def _finish(self, stop: int, finished: bool, failure: Exception | None) -> None:
        """Close everything. Then raise an exception if the run is not finished."""
        stopped = f"Stopped by {signal.Signals(stop).name} after step {self.steps_done}" if stop else ""
        problems = [hook.ended(self.steps_done, stopped) for hook in reversed(self.hooks)]
        self.close()
        for problem in (failure, *problems):
            if problem is not None:
                raise problem
        if stopped and not finished:
            if not self.job.checkpoint.enable:
                raise StoppedUnsaved(f"{stopped}: nothing saved, as checkpoint.enable is false.", signal.Signals(stop))
            raise StoppedBySignal(f"{stopped}: saved.")
        self.log(Event(f"Finished after step {self.steps_done}.", "finish", self.steps_done))


def exchange(request: Request, group: dist.ProcessGroup) -> Callable[[], Request]:
    """Begin to tell the other ranks what this one asks for, by one all-reduce on the CPU. All ranks call it together.

    Args:
        group: It must support CPU tensors.

    Returns:
        A function that waits for the end, and returns what any rank asks for.
    """
    flags = torch.tensor(request, dtype=torch.int32)
    work = dist.all_reduce(flags, dist.ReduceOp.MAX, group, async_op=True)
    assert work is not None

    def receive() -> Request:
        work.wait()
        return Request(*flags.tolist())

    return receive
