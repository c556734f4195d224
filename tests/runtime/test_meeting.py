"""Where ranks meet: see tests/distributed/test_network.py for what listens, and where."""

from datetime import timedelta

import pytest

from titanlite.config.errors import UserError
from titanlite.runtime.meeting import meeting_store
from titanlite.runtime.process import STORE


def test_a_world_that_no_launcher_has_described_is_answered_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STORE, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        UserError, match="WORLD_SIZE=2, but no MASTER_ADDR and no MASTER_PORT: `NGPU=2 titanlite launch`"
    ):
        meeting_store(0, 2, timedelta(seconds=1))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert meeting_store(0, 2, timedelta(seconds=1)) is None  # torchrun's
