"""What all tests share: fast tests run first, and one thread a process."""

import os

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
