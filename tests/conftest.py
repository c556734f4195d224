"""Test order, fixtures and environment variables that all tests share."""

import gc
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from small_runs import SMALL_WITHOUT_WORKERS

from titanlite import cli
from titanlite.observe.gpus import list_gpus

# The tests in tests/gpu also run without hypothesis.
with suppress(ImportError):
    from hypothesis import settings

    # Examples exceed any deadline when the machine is busy.
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")
# This must precede the import of torch. Tests run at the same time as other tests and their ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiler processes would import torch once more for each rank.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Launchers in tests must not inherit the variables of a launcher that runs the tests.
LAUNCHER_VARIABLES = """
NGPU NNODES NODE_RANK MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_WORLD_SIZE LOCAL_RANK LOG_RANK
MAX_RESTARTS TITANLITE_COMMAND TITANLITE_CONSTRAINTS PYTHON
"""
for name in LAUNCHER_VARIABLES.split():
    os.environ.pop(name, None)

GHOST = Path(__file__).parents[1] / ".venv-ghost/ghost/libcuda.so.1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked as long")
    parser.addoption(
        "--ghost",
        action="store_true",
        help="run all tests on the ghost GPU, and no other tests",
    )


# This must run before pytest-xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only_ghost = config.getoption("--ghost")
    has_ghost = GHOST.exists()
    if only_ghost:
        items[:] = [item for item in items if item.get_closest_marker("ghost")]
    for item in items:
        if item.get_closest_marker("ghost") and not has_ghost and not only_ghost:
            item.add_marker(pytest.mark.skip(reason="needs the ghost GPU: tests/ghost/build.sh"))
        if item.get_closest_marker("long") and not only_ghost and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes long: ./run_tests.sh --long"))
        if not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    # The sort is stable, so tests with the same key keep their order.
    items.sort(key=sort_key)


def pytest_collection_finish() -> None:
    gc.collect()
    # torch and all test modules stay loaded, so garbage collections need not traverse them again.
    gc.freeze()


def sort_key(item: pytest.Item) -> int:
    """Return the sort key of a test: fast tests, then slow groups, then single slow tests.

    Single slow tests come last because they can fill the remaining time of either worker.
    """
    if item.get_closest_marker("slow") is None:
        return 0
    return 1 if item.get_closest_marker("xdist_group") else 2


def _has_process_group() -> bool:
    # Tests without torch should not import it.
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


@pytest.fixture(autouse=True)
def restore_process_state() -> Iterator[None]:
    """Restore environment variables, loggers, process groups and caches after each test.

    Commands that run in this process change them, including the level of the handlers of torch,
    among which are those of pytest: without this fixture, `caplog` would miss later warnings.
    """
    environment = dict(os.environ)
    had_group = _has_process_group()
    loggers = [logging.getLogger(name) for name in ("titanlite", "py.warnings")]
    before = [(logger.propagate, logger.level, list(logger.handlers)) for logger in loggers]
    levels = {handler: handler.level for handler in logging.getLogger("torch").handlers}
    yield
    # A failed test may leave ranks running.
    for world in [*getattr(sys.modules.get("ranks"), "OPEN", ())]:
        world.close()
    if _has_process_group() and not had_group:
        sys.modules["torch.distributed"].destroy_process_group()
    for logger, (propagate, level, handlers) in zip(loggers, before, strict=True):
        logger.propagate = propagate
        logger.handlers = handlers
        logger.setLevel(level)
    for handler, level in levels.items():
        handler.setLevel(level)
    logging.captureWarnings(False)
    list_gpus.cache_clear()
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """Write the small job."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL_WITHOUT_WORKERS)
    return path


@pytest.fixture
def write_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that writes a module which this process and its ranks can import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `titanlite COMMAND` in this process.

    The function checks the exit code, and returns the output and the errors.
    """

    def run(command: str, code: int = 0) -> str:
        assert cli.main(shlex.split(command)) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return out + err

    return run


@pytest.fixture
def cpu_seconds() -> Callable[[Callable[[], object]], float]:
    """Return a function that measures the CPU seconds of a call and its children, best of five.

    Unlike wall-clock time, CPU time hardly depends on other tests that run at the same time.
    """

    def measure(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(5):
            before = sum(os.times()[:4])
            call()
            after = sum(os.times()[:4])
            taken.append(after - before)
        return min(taken)

    return measure


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Initialize a process group with one rank, as a run on one process has."""
    # Tests without torch should not import it.
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
