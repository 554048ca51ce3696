"""Samples that are run and counted in blocks: bit for bit as one by one."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import small_convnet
from numpy.typing import NDArray

from calibration.arrays import Sample
from calibration.calibrate import Checkpoint, observe_tensors
from calibration.channels import ChannelWatch
from calibration.dataset import memory_dataset
from calibration.errors import CalibrationError
from calibration.observer import Histogram
from calibration.runs import BLOCK_BYTES, Arrays, Block
from calibration.samples import Skipped
from calibration.state import read_state
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import MAX_BLOCK, ActivationRunner, SharedRunner
from toolkit.quantize.quantize import calibrated_tensors

MODEL = "c" * 64
TENSORS = ("x", "rectified", "sum")


def run(sample: Sample) -> Arrays:
    """A model without batch: an input, a rectifier and a sum over channels."""
    x = sample["x"]
    return {"x": x, "rectified": np.maximum(x, x.dtype.type(0)), "sum": x.sum(axis=1)}


class InBlocks:
    """The same model, which takes blocks."""

    def __init__(self, block: int, refuses: bool = False) -> None:
        self.block = block
        self.blocks: list[int] = []
        self._refuses = refuses

    def __call__(self, feeds: Sample) -> Arrays:
        return run(feeds)

    def run_block(self, feeds: Arrays) -> Arrays | None:
        count = len(feeds["x"])
        self.blocks.append(count)
        if self._refuses:
            return None
        rows = [run({"x": feeds["x"][at]}) for at in range(count)]
        return {name: np.stack([row[name] for row in rows]) for name in TENSORS}


def bits(histograms: Mapping[str, Histogram]) -> Mapping[str, tuple[bytes, int, str, str]]:
    return {
        name: (one.bins.tobytes(), one.exponent, one.minimum.hex(), one.maximum.hex())
        for name, one in histograms.items()
    }


finite = st.floats(allow_nan=False, allow_infinity=False, width=16)
scales = st.integers(-60, 60).map(lambda exponent: math.ldexp(1.0, exponent))


@st.composite
def data_sets(draw: st.DrawFn) -> list[Sample]:
    """Samples of one type, each of a scale of its own; -0.0, zeros and tiny values among them."""
    kind = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    shapes = [(1, 3, 5), (2, 3, 4)] if draw(st.booleans()) else [(1, 3, 5)]
    samples = []
    for _ in range(draw(st.integers(1, 13))):
        shape = draw(st.sampled_from(shapes))
        values = draw(st.lists(finite, min_size=1, max_size=6))
        scale = 1.0 if kind is np.float16 else draw(scales)
        samples.append({"x": (np.resize(values, shape) * scale).astype(kind)})
    return samples


@settings(max_examples=150, deadline=None)
@given(data_sets(), st.integers(1, 7), st.integers(1, 3), st.booleans())
def test_blocks_change_no_bit(
    samples: list[Sample], block: int, threads: int, refuses: bool
) -> None:
    one_by_one, blocks = ChannelWatch(run), ChannelWatch(InBlocks(block, refuses))
    plain = observe_tensors(one_by_one, memory_dataset(samples), TENSORS)
    together = observe_tensors(blocks, memory_dataset(samples), TENSORS, threads=threads)
    unhashed = observe_tensors(blocks, memory_dataset(samples), TENSORS, hash_inputs=False)
    assert (bits(unhashed.histograms), unhashed.fed_sha256) == (bits(plain.histograms), "")
    assert bits(together.histograms) == bits(plain.histograms)
    assert together.fed_sha256 == plain.fed_sha256
    assert together.samples == unhashed.samples == plain.samples
    assert blocks.samples == 2 * one_by_one.samples
    assert blocks.dead == one_by_one.dead


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2)), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 3),
)
def test_the_error_is_that_of_the_first_sample(
    places: list[tuple[int, int]], block: int, threads: int
) -> None:
    samples: list[Sample] = [{"x": np.full((1, 3, 4), 1.0 + at, np.float32)} for at in range(16)]

    class Overflows(InBlocks):
        """Infinite tensors in some samples, which the input says."""

        def run_block(self, feeds: Arrays) -> Arrays | None:
            arrays = super().run_block(feeds)
            assert arrays is not None
            for at, x in enumerate(feeds["x"]):
                self.spoil({name: array[at] for name, array in arrays.items()}, x)
            return arrays

        def __call__(self, feeds: Sample) -> Arrays:
            return self.spoil(
                {name: array.copy() for name, array in run(feeds).items()}, feeds["x"]
            )

        def spoil(self, arrays: Mapping[str, NDArray[Any]], x: NDArray[Any]) -> Arrays:
            for sample, tensor in places:
                if x.flat[0] == 1.0 + sample:
                    arrays[TENSORS[tensor]][...] = np.inf
            return arrays

    messages = []
    for run_, count in ((Overflows(1).__call__, 1), (Overflows(block), threads)):
        with pytest.raises(CalibrationError) as raised:
            observe_tensors(run_, memory_dataset(samples), TENSORS, threads=count)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    first, tensor = min(places)
    assert f"'{TENSORS[tensor]}'" in messages[0]
    assert f"in sample {first}:" in messages[0]


class Failing:
    """Samples that are finite but the first, and a failure behind them."""

    requested = 100
    skipped: tuple[Skipped, ...] = ()
    names: tuple[str, ...] = ()

    def sha256(self) -> str:
        return ""

    def __iter__(self) -> Iterator[Sample]:
        for at in range(3):
            yield {"x": np.full((1, 3, 4), np.inf if at == 0 else 1.0, np.float32)}
        raise OSError("the disk is gone")

    def __len__(self) -> int:
        return 100


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [1, 8])
def test_an_error_of_a_sample_comes_before_one_of_the_data_behind_it(
    block: int, threads: int
) -> None:
    with pytest.raises(CalibrationError, match="in sample 0:"):
        observe_tensors(InBlocks(block), Failing(), TENSORS, threads=threads)


@pytest.mark.parametrize(
    ("count", "threads", "expected"), [(40, 1, [7] * 5 + [5]), (8, 2, [2] * 4)]
)
def test_blocks_are_as_large_as_allowed_while_all_threads_have_work(
    count: int, threads: int, expected: list[int]
) -> None:
    samples: list[Sample] = [{"x": np.ones((1, 3, 4), np.float32)} for _ in range(count)]
    blocks, seen = InBlocks(7), []
    observe_tensors(
        blocks, memory_dataset(samples), TENSORS, lambda *row: seen.append(row), threads=threads
    )
    assert blocks.blocks == expected
    assert seen == [(done, count) for done in range(1, count + 1)]


def test_a_checkpoint_holds_whole_samples_and_is_continued(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    samples: list[Sample] = [
        {"x": rng.normal(size=(1, 3, 4)).astype(np.float32)} for _ in range(25)
    ]
    keep = Checkpoint(tmp_path / "state", MODEL, every=10)

    def stop(done: int, _total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe_tensors(InBlocks(7), memory_dataset(samples), TENSORS, stop, keep, threads=2)
    assert read_state(keep.path).samples in {10, 20}
    again = observe_tensors(InBlocks(7), memory_dataset(samples), TENSORS, None, keep, threads=2)
    plain = observe_tensors(run, memory_dataset(samples), TENSORS)
    assert bits(again.histograms) == bits(plain.histograms)


@pytest.mark.parametrize("size", [32, 9])  # 9: activations that are no multiple of an alignment
def test_a_network_gives_the_bits_of_single_runs(
    tmp_path: Path, rng: np.random.Generator, size: int
) -> None:
    graph, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng, size, 7)).model)
    runner = ActivationRunner(graph, calibrated_tensors(graph), threads=1)
    shared = SharedRunner(runner)
    assert shared.block == MAX_BLOCK
    for count in (5, 3):  # the second writes into the memory of the first
        x = rng.normal(size=(count, 1, 3, size, size)).astype(np.float32)
        together = shared.run_block({"x": x})
        assert together is not None
        for at in range(count):
            plain = runner({"x": x[at]})
            assert together.keys() == plain.keys()
            for name, array in plain.items():
                np.testing.assert_array_equal(together[name][at], array, strict=True)


def test_activations_of_a_block_have_a_limit(tmp_path: Path, rng: np.random.Generator) -> None:
    graph, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng, 160)).model)
    runner = ActivationRunner(graph, tensors := calibrated_tensors(graph), threads=1)
    x = rng.normal(size=(1, 3, 160, 160)).astype(np.float32)
    a_sample = sum(array.nbytes for name, array in runner({"x": x}).items() if name != "x")
    assert SharedRunner(runner).block == BLOCK_BYTES // a_sample < MAX_BLOCK
    assert "x" in tensors


@pytest.mark.parametrize(("size", "count"), [(1, 32), (BLOCK_BYTES // 2, 2), (BLOCK_BYTES, 1)])
def test_inputs_of_a_block_have_a_limit(size: int, count: int) -> None:
    for more, samples in ((0, count), (1, max(1, count - 1) if size > 1 else count)):
        sample = {"x": np.zeros(size + more, np.uint8)}
        block = Block(0, sample, 32)
        while not block.full:
            block.append(sample)
        assert block.count == samples


def test_a_block_with_a_sample_that_does_not_fit_is_run_one_by_one(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    graph, _ = run_passes(import_model(small_convnet(tmp_path / "m.onnx", rng)).model)
    shared = SharedRunner(ActivationRunner(graph, ("y",), threads=1))
    narrow = rng.normal(size=(2, 1, 2, 32, 32)).astype(np.float32)
    assert shared.run_block({"x": narrow}) is None
    samples: list[Sample] = [{"x": narrow[0]}] * 4
    with pytest.raises(BuildError, match="cannot run the model on a calibration sample"):
        observe_tensors(shared, memory_dataset(samples), ["y"])
