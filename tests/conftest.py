"""Shared fixtures: a fixed seed for hypothesis runs and models made by others."""

import os

# Triton decides when it is imported whether kernels are interpreted. PyTorch, too, imports it, so
# this comes before any test module. Workers that compile drop it from their environment.
os.environ["TRITON_INTERPRET"] = "1"
# A test of a build is to see one, not what another test has built.
os.environ["TANDEM_REBUILD"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: more threads of PyTorch and OpenBLAS would spin as they wait.
    for library in ("OMP", "OPENBLAS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    # Each process that compiles kernels imports Triton first, which takes a second.
    os.cpu_count = lambda: 1

import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import onnx
import pytest

from toolkit.cli.log import PACKAGES

# `--hypothesis-profile thorough` tries twice as many examples where a test does not say how many.
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "default", hypothesis.settings.get_profile("thorough"), max_examples=50
)
hypothesis.settings.load_profile("default")

RNG_SEED = pytest.StashKey[int]()
FROZEN_MODULES = pytest.StashKey[int]()  # how many there were at the last gc.freeze()
LIGHT_MODELS = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let a worker not ask before each test how often that has ended a worker.

    pytest-rerunfailures asks over a socket, in packets that wait for each other: 40 ms a test. The
    first process counts the workers that end, so a test that ends one still runs once more.
    """
    reruns = config.getoption("reruns", None)
    if not reruns or not hasattr(config, "failures_db"):
        return
    if hasattr(config, "workerinput"):
        from pytest_rerunfailures import StatusDB

        config.failures_db = StatusDB()  # in memory, as without workers
    else:
        config.failures_db.get_test_reruns = lambda _test: reruns


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep what collection makes out of every search for garbage: one would take half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        session.config.stash[FROZEN_MODULES] = len(sys.modules)
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Keep modules that tests have imported since out of these searches, too."""
    if len(sys.modules) - item.config.stash[FROZEN_MODULES] > 100:
        item.config.stash[FROZEN_MODULES] = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders and files whose tests are long: at the end they would run alone.

    Before them come the tests of PyTorch's exporter, which takes seconds to import: neighbours run
    in one worker.
    """
    long = ("tests/repository/", "tests/scripts/", "tests/runtime/test_native")

    def place(item: pytest.Item) -> int:
        if "quick_torch_export" in getattr(item, "fixturenames", ()):
            return 0
        return 1 if item.nodeid.startswith(long) else 2

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _log_levels() -> None:
    """Start each test without levels of -v and -q.

    A command line in this process sets them, also one in a module's fixture, which runs before.
    """
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh random numbers in each run; the seed is printed when a test fails.

    `--reruns` gives a test the same numbers again.
    """
    fresh = int(np.random.SeedSequence().generate_state(1)[0])
    seed = request.node.stash.setdefault(RNG_SEED, fresh)
    request.node.add_report_section("setup", "seed", f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[object]:
    """A Mosquitto of the test's own."""
    from mqtt_fixtures import Mosquitto

    with contextlib.closing(Mosquitto(tmp_path)) as mosquitto:
        yield mosquitto


@pytest.fixture
def board(tmp_path: Path, broker: Any) -> Iterator[object]:
    """An `AgentBox` behind the broker; the test starts its agent."""
    from mqtt_fixtures import AgentBox

    with contextlib.closing(AgentBox(tmp_path, broker.port)) as box:
        yield box


@pytest.fixture
def light_models() -> Path:
    """The folder of the nine light models that travel inside the onnx wheel."""
    return LIGHT_MODELS


@pytest.fixture
def quick_torch_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export by PyTorch's own functions, which are read once, not for each export."""
    import torch_export

    torchs = "torch.onnx._internal.exporter._registration.ONNXRegistry.from_torchlib"
    monkeypatch.setattr(torchs, staticmethod(torch_export.registry))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build as on a host without Triton: for tests of what is not compiled, which takes minutes."""
    monkeypatch.setattr("toolkit.gpu.segments.has_compiler", lambda: False)


@pytest.fixture(scope="session")
def tandem_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`tandem` for shells, whose commands need no imports of their own."""
    from preloaded_tandem import preloaded_tandem

    with preloaded_tandem(tmp_path_factory.mktemp("tandem")) as program:
        yield program


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard. A shell that starts the tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
