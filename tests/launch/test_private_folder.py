"""A run has a folder of its own, or says why it cannot."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from titanlite.config.errors import UserError
from titanlite.launch.agent import World, run_workers


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EMFILE])
def test_a_temporary_folder_that_cannot_be_locked_is_said_once(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[object] = []

    def refuse(*of: object) -> None:
        asked.append(of)
        assert len(asked) == 1  # it tried for ever
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"a run needs a folder there: .* Set TMPDIR"):
        run_workers([], World(1))
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_that_is_gone_is_said_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(UserError, match="/nonexistent: a run needs a folder there"):
        run_workers([], World(1))
