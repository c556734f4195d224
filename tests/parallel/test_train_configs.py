"""Every job file in train_configs/ runs a step on fake tensors of any rank."""

import re

import pytest
from ranks import titanlite
from small_runs import ROOT, read_printed_json

from titanlite.config.flavors import FLAVORS
from titanlite.observe.flops import num_params

CONFIGS = ROOT / "train_configs"
# Number of ranks in the first lines of each file.
WORLD = {
    **dict.fromkeys(("debug_model", "fineweb_debugmodel", "fineweb_150m", "llama_1b"), 1),
    **{"fineweb_1b": 8, "fineweb_8b": 64, "llama_3b": 4, "llama_8b": 8, "llama_8b_float8": 8},
    **{"llama_70b": 64, "llama_405b": 512},
}


def test_every_job_file_is_tested_with_the_ranks_in_its_header():
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(WORLD)
    for name, ranks in WORLD.items():
        header = (CONFIGS / f"{name}.toml").read_text().split("\n\n")[0]
        gpus = re.search(r"on (\d+) GPUs", header)
        documented_ranks = int(gpus[1]) if gpus else 1
        assert documented_ranks == ranks


CASES = []
for name in WORLD:
    marks = () if "debug" in name else pytest.mark.long
    CASES.append(pytest.param(name, marks=marks))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_job_file_fits_on_its_gpus(name):
    options = f"--quick --json --gpu H100 --world-size {WORLD[name]}".split()
    flavor = name.partition("_")[2].removesuffix("_float8")
    # The text and the tokenizer of these jobs are not part of the repository.
    if name.startswith("fineweb_"):
        sources = "--dataset.source python_stdlib --dataset.path None"
        tokenizer = "--tokenizer.path assets/tokenizer/tokenizer.model"
        options += f"{sources} {tokenizer} --model.vocab_size {FLAVORS[flavor].vocab_size}".split()
    output = titanlite("plan", *options, "--job.config_file", CONFIGS / f"{name}.toml")
    plan = read_printed_json(output)

    assert plan["peak"] + plan["allowance"] < plan["memory"]

    # The ranks of these jobs have different numbers of weights.
    if name not in ("debug_model", "llama_70b", "llama_405b"):
        expected = 4 * num_params(FLAVORS[flavor]) / WORLD[name]
        assert plan["kinds"]["weights"] == pytest.approx(expected, rel=0.02)
