"""An altered manifest, whose checksum fits, is refused as damage or in words, or the right tensors are loaded."""

import contextlib
import json

import pytest
from mutants import mutant
from resumes import Resumes

from titanlite.checkpoint.manifest import encode_manifest, read_manifest

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("count", [120, pytest.param(2500, marks=pytest.mark.long)])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "as it is"])
def test_mutants(tmp_path, count, sealed):
    runs = Resumes(tmp_path)
    body = read_manifest(runs.good)
    good = json.dumps(body).encode() if sealed else encode_manifest(body)
    taken = 0
    for number in range(count if sealed else count // 4):
        raw = mutant(good, number, is_json=True)
        if sealed:
            with contextlib.suppress(ValueError, TypeError):  # the bytes are no JSON any more, or no object
                raw = encode_manifest(json.loads(raw))
        taken += runs.resume(number, lambda path, raw=raw: (path / "manifest.json").write_bytes(raw))
    assert (0 < taken < count / 2) if sealed else taken == 0
