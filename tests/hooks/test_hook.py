"""The doors of the loop: a hook is called on all ranks, and asks for things. (What it keeps: test_ema, test_guards.)"""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from ranks import run_ranks, small_trainer
from small_runs import logged

from titanlite.hooks.hook import Hook, Request

pytestmark = pytest.mark.slow


class Asking(Hook):
    """Has numbers of its own. Rank 1 asks for a save after step 3, and for a validation after step 4."""

    def wants(self, step: int) -> Request:
        return Request(save=step == 3 and dist.get_rank() == 1, validate=step == 4 and dist.get_rank() == 1)

    def numbers(self, step: int) -> dict[str, float]:
        return {"skipped_records": 7, "mine": step / 2}


def follow(folder: str) -> list[tuple[str, int | None]]:
    """The calls of a hook, each with its step."""
    hook = Mock(spec=Hook, wraps=Asking())
    words = ["--training.steps", "4", "--checkpoint.interval", "2", "--metrics.log_freq", "2", "--validation.freq", "9"]
    words += ["--validation.holdout", "0.1", "--validation.sequences", "2"]
    with small_trainer(folder, hook, *words) as trainer:
        trainer.train()
    calls = [(name, args[0] if args and isinstance(args[0], int) else None) for name, args, _ in hook.mock_calls]
    return [call for call in calls if call[0] not in ("wants", "stopping", "numbers", "state_dict", "tensors")]


def test_a_hook_is_called_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, follow, str(tmp_path))
    assert first == second
    step = ("before_step", "gradients", "before_update", "updated", "after_step")
    assert first == [
        *[("built", None), ("load", None), ("started", 0), ("train_begins", 0), ("validated", 0)],
        *[(name, 1) for name in step],
        *[("logged", None), ("act", 1)],
        *[(name, 2) for name in step],
        *[("logged", None), ("saving", 2), ("saved", 2), ("act", 2)],
        *[(name, 3) for name in (*step, "saving", "saved", "act")],
        *[(name, 4) for name in step],
        *[("logged", None), ("saving", 4), ("saved", 4), ("validated", 4), ("act", 4), ("ended", 4)],
    ]
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoint").glob("step-*"))
    assert saved == ["step-00000002", "step-00000003", "step-00000004"]
    lines = logged(tmp_path / "out").values()
    assert [(line["skipped_records"], line["mine"]) for line in lines] == [(7, 0.5), (7, 1.0), (7, 2.0)]
