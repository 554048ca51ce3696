"""Calibration data of every kind: pictures, arrays, videos and iterables feed the same inputs."""

import cv2
import numpy as np
import onnx_ir as ir
import pytest
from model_fixtures import small_convnet
from video_fixtures import SIZE, gray_frame, ramp, ramp_index, write_video

from calibration.calibrate import Checkpoint, calibrate, observe_tensors
from calibration.dataset import InputSpec, Skipped, iterable_dataset
from calibration.errors import CalibrationError
from calibration.threshold import METHODS
from device.errors import SourceError
from pipelines.config import PreprocessConfig
from pipelines.stages.preprocess import preprocess
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.importers.onnx import import_model
from toolkit.quantize.ranges.data import input_specs, open_data
from toolkit.quantize.ranges.measure import RangeOptions

SPEC = InputSpec("images", (1, 3, SIZE, SIZE))
MODEL = "a" * 64


def indices(data):
    """Which pictures of `ramp` a data set gives; the input is RGB, 0 to 1."""
    return [ramp_index(np.rint(sample["images"] * 255)) for sample in data]


@pytest.fixture
def video(tmp_path):
    return write_video(tmp_path / "ramp.mp4", ramp(20))


@pytest.fixture
def folder(tmp_path):
    for number, frame in enumerate(ramp(10)):
        cv2.imwrite(str(tmp_path / f"{number:02}.png"), frame)
    return tmp_path


# Videos.


@pytest.mark.parametrize("limit", [1, 4, 7, 20])
def test_the_frames_of_a_video_are_spread_evenly(video, limit):
    data = open_data(video, [SPEC], limit=limit)
    assert indices(data) == [number * 20 // limit for number in range(limit)]
    assert (len(data), data.requested, data.skipped) == (limit, limit, ())


def test_a_video_gives_all_its_frames_again_and_again(video):
    data = open_data(str(video), [SPEC])
    assert indices(data) == indices(data) == list(range(20))


def test_more_frames_asked_than_there_are_is_visible(video):
    data = open_data(video, [SPEC], limit=500)
    assert (data.requested, len(data)) == (500, 20)


def test_frames_go_through_the_preprocessing_of_the_pipeline(tmp_path, rng):
    frame = np.kron(rng.integers(0, 256, (6, 8, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    path = write_video(tmp_path / "one.avi", [frame], fourcc="MJPG")
    decoded = cv2.VideoCapture(str(path)).read()[1]
    config = PreprocessConfig(width=SIZE, height=SIZE, color="bgr", std=(0.5, 1.0, 2.0))
    (sample,) = open_data(path, [SPEC], config)
    assert np.array_equal(sample["images"], preprocess(decoded, config)[0])


def test_the_hash_of_a_video_depends_on_its_bytes_and_the_frames_taken(video, tmp_path):
    first = open_data(video, [SPEC], limit=5).sha256()
    assert first == open_data(video, [SPEC], limit=5).sha256()
    assert first != open_data(video, [SPEC], limit=6).sha256()
    write_video(video, ramp(21)[1:])
    assert first != open_data(video, [SPEC], limit=5).sha256()


def test_a_video_that_is_cut_off_gives_what_is_left_and_says_so(tmp_path):
    rng = np.random.default_rng(3)
    frames = [rng.integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8) for _ in range(30)]
    path = write_video(tmp_path / "cut.avi", frames, fourcc="MJPG")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    data = open_data(path, [SPEC])
    given = len(list(data))
    assert 0 < given < 30
    assert given + len(data.skipped) == len(data)


def test_what_is_no_video_is_named(tmp_path):
    (tmp_path / "x.mp4").write_bytes(b"no video")
    with pytest.raises(SourceError, match=r"x\.mp4 is not a video"):
        open_data(tmp_path / "x.mp4", [SPEC])
    with pytest.raises(SourceError, match=r"no such file.*none\.mp4"):
        open_data(tmp_path / "none.mp4", [SPEC])


def test_a_video_for_a_model_that_takes_no_images_is_refused(video):
    with pytest.raises(CalibrationError, match=r"holds images, .* no single image input"):
        open_data(video, [InputSpec("x", (1, 7))])
    with pytest.raises(CalibrationError, match="limit is 0 samples"):
        open_data(video, [SPEC], limit=0)
    with pytest.raises(CalibrationError, match=r"shape \[1, 3, 32, 32\], but.* \[1, 3, 64, 64\]"):
        open_data(video, [SPEC], PreprocessConfig(width=32, height=32))
    with pytest.raises(CalibrationError, match=r"no single image input.*\[1, 3, 64, 64\]"):
        open_data(video, [InputSpec("images", (1, 3, SIZE, SIZE), "int32")])


# Pictures and batches.


def test_images_of_a_folder_and_frames_of_a_video_give_the_same_input(tmp_path):
    frame = gray_frame(117)
    cv2.imwrite(str(tmp_path / "a.png"), frame)
    (one,) = open_data(tmp_path, [SPEC])
    assert np.array_equal(
        one["images"], preprocess(frame, PreprocessConfig(width=64, height=64))[0]
    )


def test_images_for_an_input_of_unknown_size_are_refused_with_a_way_out(folder):
    with pytest.raises(CalibrationError, match=r"no single image input of known size.*--shape"):
        open_data(folder, [InputSpec("images", (1, 3, None, None))])


def test_images_are_stacked_for_an_input_with_a_batch_and_the_rest_is_counted(folder):
    data = open_data(folder, [InputSpec("images", (4, 3, SIZE, SIZE))])
    images = [sample["images"] for sample in data]
    assert [batch.shape for batch in images] == [(4, 3, SIZE, SIZE)] * 2
    stacked = np.concatenate(images)
    assert [ramp_index(np.rint(one * 255)) for one in stacked] == list(range(8))
    assert data.skipped == (Skipped("the last 2 samples", "they do not fill a batch of 4"),)
    assert (len(data), data.requested) == (2, 2)


def test_the_limit_counts_batches(video):
    data = open_data(video, [InputSpec("images", (2, 3, SIZE, SIZE))], limit=3)
    results = [ramp_index(np.rint(one * 255)) for sample in data for one in sample["images"]]
    assert results == [0, 3, 6, 10, 13, 16]
    assert data.requested == 3


def test_an_unreadable_image_does_not_tear_a_batch(folder):
    (folder / "01.png").write_bytes(b"bad")
    data = open_data(folder, [InputSpec("images", (3, 3, SIZE, SIZE))])
    results = [ramp_index(np.rint(one * 255)) for sample in data for one in sample["images"]]
    assert results == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [skipped.name for skipped in data.skipped] == ["01.png"]


def test_fewer_images_than_a_batch_are_an_error(folder):
    data = open_data(folder, [InputSpec("images", (16, 3, SIZE, SIZE))])
    with pytest.raises(
        CalibrationError, match="10 calibration samples do not fill one batch of 16"
    ):
        list(data)


# Iterables.

VECTOR = InputSpec("x", (1, 4))


def vectors(count):
    return [np.full((1, 4), number, np.float32) for number in range(count)]


def firsts(data):
    return [float(sample["x"][0, 0]) for sample in data]


def test_a_generator_is_read_once_and_says_so_the_second_time():
    data = open_data((vector for vector in vectors(5)), [VECTOR])
    assert firsts(data) == [0, 1, 2, 3, 4]
    assert len(data) == data.requested == 5
    with pytest.raises(CalibrationError, match="used up by the first pass"):
        list(data)


def test_a_generator_gives_no_more_than_the_limit():
    taken = []
    endless = (taken.append(number) or np.full(4, number, np.float32) for number in range(10**9))
    assert firsts(iterable_dataset(endless, [VECTOR], 3)) == [0, 1, 2]
    assert taken == [0, 1, 2]


def test_a_sequence_is_spread_over_evenly_and_read_again():
    for source in (vectors(10), np.concatenate(vectors(10))):
        data = open_data(source, [VECTOR], limit=3)
        assert firsts(data) == firsts(data) == [0, 3, 6]
        assert (len(data), data.requested) == (3, 3)
    assert open_data(vectors(10), [VECTOR], limit=50).requested == 50


def test_something_that_makes_a_new_iterator_each_time_is_read_again():
    class Loader:
        def __iter__(self):
            return iter(vectors(3))

    data = open_data(Loader(), [VECTOR])
    assert firsts(data) == firsts(data) == [0, 1, 2]


def test_samples_feed_inputs_by_name_and_get_their_batch_axis():
    mask = InputSpec("mask", (1, 2), "int64")
    (sample,) = open_data(
        [{"x": np.ones(4, np.float32), "mask": np.zeros((1, 2), int)}], [VECTOR, mask]
    )
    assert {name: array.shape for name, array in sample.items()} == {"x": (1, 4), "mask": (1, 2)}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"y": np.ones(4)}, r"sample 1 feeds \['y'\], but the model's inputs are \['x'\]"),
        ("x", "sample 1 feeds str"),
        ({"x": [1.0] * 4}, "sample 1, input 'x', is a list: give a numpy array of float32"),
        (np.ones(4), "sample 1, input 'x', is float64 of shape"),
        (np.ones((2, 4), np.float32), r"shape \[2, 4\]"),
        (np.full(4, np.nan, np.float32), "sample 1, input 'x', holds 4 NaN"),
    ],
)
def test_an_item_that_is_no_sample_is_named(item, message):
    with pytest.raises(CalibrationError, match=message):
        list(open_data([*vectors(1), item], [VECTOR]))


def test_a_generator_can_be_calibrated_on_and_has_a_hash_of_what_it_gave():
    def table(source):
        data = open_data(source, [VECTOR])
        return calibrate(lambda sample: sample, data, ["x"], model_sha256=MODEL).table

    assert table(iter(vectors(9))) == table(vectors(9))
    assert table(iter(vectors(9))).data_sha256 != table(iter(vectors(8))).data_sha256


def test_an_observation_of_a_generator_goes_on_with_a_new_one(tmp_path):
    keep = Checkpoint(tmp_path / "state", MODEL, 2)

    def stop(sample):
        if sample["x"][0, 0] == 5:
            raise KeyboardInterrupt
        return sample

    with pytest.raises(KeyboardInterrupt):
        observe_tensors(stop, open_data(iter(vectors(8)), [VECTOR]), ["x"], checkpoint=keep)
    ran = []
    source = open_data(iter(vectors(8)), [VECTOR])
    observe_tensors(lambda sample: ran.append(1) or sample, source, ["x"], checkpoint=keep)
    assert len(ran) == 4


# A build takes them all.


def test_an_engine_is_built_from_a_video_and_from_a_generator(tmp_path, rng):
    model = small_convnet(tmp_path / "m.onnx", rng)
    noise = [rng.integers(0, 256, (32, 32, 3)).astype(np.uint8) for _ in range(6)]
    video = write_video(tmp_path / "v.avi", noise, fourcc="MJPG")
    arrays = (rng.normal(size=(1, 3, 32, 32)).astype(np.float32) for _ in range(6))
    for source, method in ((video, "mse"), (arrays, "percentile:99.9")):
        options = BuildOptions(data=source, ranges=RangeOptions(method, samples=4))
        result = build_engine(model, "laptop", tmp_path / "m.engine", options)
        assert (result.calibration.samples, result.calibration.table.method) == (4, method)


def test_the_inputs_of_a_graph_are_read_with_their_free_dimensions(tmp_path, rng):
    graph = import_model(small_convnet(tmp_path / "m.onnx", rng)).model
    assert input_specs(graph) == [InputSpec("x", (1, 3, 32, 32))]
    graph.graph.inputs[0].shape = ir.Shape(("batch", 3, 32, 32))
    assert input_specs(graph) == [InputSpec("x", (None, 3, 32, 32))]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_samples_that_are_not_finite_further_on_name_tensor_and_sample(method):
    def overflow(sample):
        return {"y": np.where(sample["x"] == 2, np.float32(np.inf), sample["x"])}

    with pytest.raises(CalibrationError, match=r"tensor 'y' holds 0 NaN and 4 infinite.*sample 2"):
        calibrate(overflow, open_data(vectors(3), [VECTOR]), ["y"], method, model_sha256=MODEL)
