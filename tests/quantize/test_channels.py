"""Dead channels: counted as a plain look at all samples counts them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from calibration.channels import ChannelWatch, DeadChannels


def sparse(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Most channels are zero in most samples, so that each sample may bring some to life."""
    array = rng.normal(size=shape) * (rng.random(shape) < 0.1)
    alive = rng.random(shape[1]) < 0.3
    return (array * alive.reshape(-1, *(1,) * (len(shape) - 2))).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 12, 5, 4), (3, 12, 2), (2, 12)])
def test_dead_channels_are_those_that_are_zero_in_all_samples(
    rng: np.random.Generator, shape: Sequence[int]
) -> None:
    given = [{"t": sparse(rng, shape)} for _ in range(4)]
    given[0]["t"][0, 0] = 1.0  # not all are dead
    given = [
        {"t": np.array(one["t"], order=order)} for one, order in zip(given, "CFCF", strict=True)
    ]
    for one in given:
        one["t"][:, 5] = 0.0  # at least one is
    watch = ChannelWatch(lambda sample: sample)
    for sample in given:
        assert watch(sample) is sample
    together = np.concatenate([one["t"] for one in given])
    dead = sum(not together[:, channel].any() for channel in range(shape[1]))
    assert watch.dead == {"t": DeadChannels(dead, shape[1])}
    assert watch.samples == 4


def test_tensors_that_are_dead_alive_or_have_no_channels_are_left_out() -> None:
    watch = ChannelWatch(lambda sample: sample)
    watch(
        {
            "dead": np.zeros((1, 4, 2), np.float32),
            "alive": np.ones((1, 4, 2), np.float32),
            "vector": np.zeros(4, np.float32),
            "empty": np.zeros((0, 4), np.float32),
        }
    )
    assert watch.dead == {}


def test_channels_of_a_dynamic_dimension_have_no_count() -> None:
    watch = ChannelWatch(lambda sample: sample)
    for length in (3, 5):
        watch({"t": np.zeros((1, length, 2), np.float32)})
    assert watch.dead == {}


def test_threads_lose_no_channel() -> None:
    """Each sample brings one channel to life; whoever forgets one of them counts it as dead."""
    count = 200
    samples = [{"t": np.zeros((1, count + 1, 2), np.float32)} for _ in range(count)]
    for number, sample in enumerate(samples):
        sample["t"][0, number] = 1.0
    watch = ChannelWatch(lambda sample: sample)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(watch, samples))
    assert (watch.dead, watch.samples) == ({"t": DeadChannels(1, count + 1)}, count)
