"""An exported model under lm-evaluation-harness, on a task of local data. Needs the extra `eval`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import SMALL

ROOT = Path(__file__).parents[1]
MISSING = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
TEXTS = ["import os\n\n\ndef names(folder):\n    return sorted(os.listdir(folder))\n", "class A:\n    pass\n" * 4]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)}: pip install 'titanlite[eval]'")
def test_the_command_of_the_documentation_gives_the_bits_per_byte_of_titanlite_eval(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (task,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (command,) = re.findall(
        r"^lm_eval .*?--output_path results$", page.split("```yaml")[1], flags=re.DOTALL | re.MULTILINE
    )
    (tmp_path / "job.toml").write_text(SMALL)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "my_text.yaml").write_text(task)
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    titanlite("train", "--job.config_file", tmp_path / "job.toml", "--job.dump_folder", tmp_path / "outputs/my_job")
    words = ["--checkpoint", tmp_path / "outputs/my_job"]
    titanlite("export", *words, "--out", tmp_path / "my-model", "--dtype", "float32")
    said = titanlite("eval", *words, "--data", tmp_path / "test.jsonl", "--window", 1024, "--json")
    (ours,) = re.findall(r"^\{.*\}$", said, flags=re.MULTILINE)

    options = command.replace("\\\n", " ").split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *options],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "results").rglob("*.json")
    theirs = json.loads(results.read_text())["results"]["my_text"]
    # fp32 sums in another order
    assert theirs["bits_per_byte,none"] == pytest.approx(json.loads(ours)["bits_per_byte"], rel=1e-5)
