"""`titanlite prove` finds every mistake of the catalog, and raises no false alarm."""

import re

import pytest
from ranks import start_titanlite

from mutants.catalog import CATALOG, Mutant

pytestmark = pytest.mark.slow
SAMPLE = ("optimizer_state_of_one_rank_on_all",)
FP32 = ("--training.mixed_precision_param", "float32")


def make_param(mutant: Mutant) -> object:
    marks = () if mutant.name in SAMPLE else (pytest.mark.long,)
    return pytest.param(mutant, id=mutant.name, marks=marks)


@pytest.mark.parametrize("mutant", map(make_param, CATALOG.values()))
def test_a_mistake_is_detected_and_explained(mutant, tmp_path):
    layout = mutant.layout
    command = ("prove", "--job.dump_folder", tmp_path / "out", *FP32, *layout.words)
    world = start_titanlite(*command, ranks=layout.ranks, before=mutant.apply)
    world.wait()

    assert world.processes[0].exitcode == 3, world.output
    first_line = next(line for line in world.output.splitlines() if "First difference" in line)
    assert re.search(mutant.expected, first_line), first_line
