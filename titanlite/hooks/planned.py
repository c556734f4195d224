"""What the plan of this run foresaw, beside what was measured (job.plan)."""

from __future__ import annotations

from titanlite.hooks.hook import Hook, Training
from titanlite.observe.forecast import GIB, handed_down
from titanlite.runtime.logging import Event


class PlanCheck(Hook):
    """Logs the plan that the process which started this one has made, if it has."""

    def __init__(self, training: Training) -> None:
        self._training, self._plan = training, handed_down()

    def built(self, training: Training) -> None:
        if self._plan is not None:
            training.log(Event(self._plan.line(), "plan", planned=self._plan.numbers()))

    def ended(self, step: int, stopped: str) -> None:
        meter = self._training.meter
        if self._plan is not None and meter.pace is not None:
            measured = self._plan.compared(meter.memory_peak * GIB, meter.pace)
            self._training.log(Event(measured, "plan", step))
