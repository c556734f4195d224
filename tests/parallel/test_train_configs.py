"""Every job file in train_configs/ runs a step on fake tensors of any rank."""

import re
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import ROOT, read_printed_json

from titanlite.config.flavors import FLAVORS
from titanlite.observe.flops import num_params

CASES = []
for path in sorted((ROOT / "train_configs").glob("*.toml")):
    marks = () if "debug" in path.stem else pytest.mark.long
    CASES.append(pytest.param(path, id=path.stem, marks=marks))


def read_world_size(job_file: Path) -> int:
    """Return the number of GPUs that the first lines of a job file name, by default 1."""
    header = job_file.read_text().split("\n\n")[0]
    gpus = re.search(r"on (\d+) GPUs", header)
    return int(gpus[1]) if gpus else 1


@pytest.mark.slow
@pytest.mark.parametrize("job_file", CASES)
def test_a_job_file_fits_on_its_gpus(job_file):
    name = job_file.stem
    world_size = read_world_size(job_file)
    options = f"--quick --json --gpu H100 --world-size {world_size}".split()
    flavor = name.partition("_")[2].removesuffix("_float8")
    # The text and the tokenizer of these jobs are not part of the repository.
    if name.startswith("fineweb_"):
        sources = "--dataset.source python_stdlib --dataset.path None"
        tokenizer = "--tokenizer.path assets/tokenizer/tokenizer.model"
        options += f"{sources} {tokenizer} --model.vocab_size {FLAVORS[flavor].vocab_size}".split()
    output = titanlite("plan", *options, "--job.config_file", job_file)
    plan = read_printed_json(output)

    assert plan["peak"] + plan["allowance"] < plan["memory"]

    # The ranks of these jobs have different numbers of weights.
    if name not in ("debug_model", "llama_70b", "llama_405b"):
        expected = 4 * num_params(FLAVORS[flavor]) / world_size
        assert plan["kinds"]["weights"] == pytest.approx(expected, rel=0.02)
