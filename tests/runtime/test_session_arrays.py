"""Callers' own arrays for feeds and outputs: what fits is written in place, the rest is refused."""

import gc
from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import picture, split_network, write_network

from device.errors import SessionError
from device.runtime.session import Session, open_session


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An engine of two segments whose batch is dynamic, 1 to 4."""
    return write_network(tmp_path / "m.engine", split_network("batch"))


def feeds_of(session: Session, batch: int, seed: int = 1) -> dict[str, np.ndarray]:
    (tensor,) = session.inputs
    return {tensor.name: picture(batch, seed)}


def test_outputs_are_written_into_the_arrays_given(path: Path) -> None:
    with open_session(path) as session:
        feeds = feeds_of(session, 3)
        expected = session.infer(feeds)
        targets = {name: np.full_like(value, np.nan) for name, value in expected.items()}
        outputs = session.infer(feeds, targets)
    for name, value in expected.items():
        assert outputs[name] is targets[name]
        assert np.array_equal(targets[name], value)


def test_outputs_that_are_not_given_are_new(path: Path) -> None:
    with open_session(path) as session:
        feeds = feeds_of(session, 1)
        first, second = session.infer(feeds, {}), session.infer(feeds, {})
        assert all(first[name] is not second[name] for name in first)


def test_arrays_that_do_not_fit_are_refused(path: Path) -> None:
    with open_session(path) as session:
        feeds = feeds_of(session, 2)
        name, right = next(iter(session.infer(feeds).items()))
        read_only = right.copy()
        read_only.flags.writeable = False
        refused = {
            "shape": (name, np.empty((1, *right.shape[1:]), right.dtype)),
            f"give a numpy array of {right.dtype}": (name, right.astype(np.float64)),
            "of list": (name, right.tolist()),
            "C order": (name, np.empty((*right.shape, 2), right.dtype)[..., 0]),
            "read-only": (name, read_only),
            "no output 'elsewhere'": ("elsewhere", right),
        }
        for message, (key, array) in refused.items():
            with pytest.raises(SessionError, match=message):
                session.infer(feeds, {key: array})
        assert np.array_equal(session.infer(feeds)[name], right)


def test_a_session_hands_out_arrays_that_it_takes_again_and_again(path: Path) -> None:
    with open_session(path) as session:
        feeds, outputs = session.arrays({"batch": 3})
        assert {name: array.shape[0] for name, array in feeds.items()} == dict.fromkeys(feeds, 3)
        for seed in range(3):
            given = feeds_of(session, 3, seed)
            expected = session.infer(given)
            for name, array in feeds.items():
                array[...] = given[name]
            actual = session.infer(feeds, outputs)
            for name, value in expected.items():
                assert actual[name] is outputs[name]
                assert np.array_equal(outputs[name], value)


def test_arrays_are_at_the_size_that_the_engine_was_built_for_unless_asked(path: Path) -> None:
    with open_session(path) as session:
        (dim,) = session.dims
        feeds, _ = session.arrays()
        assert [array.shape[0] for array in feeds.values()] == [dim.opt]


def test_arrays_stay_valid_after_the_session(path: Path) -> None:
    with open_session(path) as session:
        feeds, outputs = session.arrays()
        session.infer(feeds, outputs)
        before = {name: array.copy() for name, array in outputs.items()}
    del session
    gc.collect()
    assert all(np.array_equal(outputs[name], value) for name, value in before.items())
    for array in feeds.values():
        array[...] = 1


@pytest.mark.parametrize(
    ("sizes", "message"), [({"batch": 5}, "takes 1 to 4"), ({"depth": 1}, "no dynamic dimension")]
)
def test_sizes_that_the_engine_does_not_take_have_no_arrays(
    path: Path, sizes: dict[str, int], message: str
) -> None:
    with open_session(path) as session, pytest.raises(SessionError, match=message):
        session.arrays(sizes)


def test_a_closed_session_has_no_arrays(path: Path) -> None:
    session = open_session(path)
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.arrays()


def test_times_of_segments_are_those_of_all_segments(path: Path) -> None:
    with open_session(path) as session:
        times = session.segment_times_ms(feeds_of(session, 1))
        assert list(times) == [report.segment for report in session.reports]
        assert all(time_ms > 0 for time_ms in times.values())
