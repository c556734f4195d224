"""What all tests share: fast tests run first, one thread a process, and a way to start a few real ranks."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("patient", deadline=None)  # an example is slow where the machine has other work
hypothesis.settings.load_profile("patient")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run beside each other and their ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes long: ./run_tests.sh --long"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable: the rest keeps its order


Torchrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def torchrun() -> Torchrun:
    """`torchrun(target, nproc, args, timeout=120)`: run a script (Path) or a module (str) on `nproc` gloo ranks.

    Fails the test with the ranks' output if they fail; `check=False` leaves that to the test.
    """

    def run(
        target: Path | str, nproc: int, args: Sequence[object] = (), timeout: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        program = [str(target)] if isinstance(target, Path) else ["-m", target]
        command = launcher + program + [str(arg) for arg in args]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        if check and ended.returncode != 0:
            pytest.fail(f"{' '.join(command)} ended with {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
        return ended

    return run
