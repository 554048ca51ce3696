"""Pictures become network inputs, compared with a plain reference."""

import cv2
import numpy as np
import pytest

from device.errors import PipelineError, PreprocessingError
from pipelines.config import PreprocessConfig
from pipelines.stages.preprocess import Preprocessor, preprocess
from pipelines.stages.view import Geometry

RNG = np.random.default_rng(7)


def random_image(height, width):
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def cropped(image, config):
    """Resize(size / fraction) and CenterCrop(size) as torchvision computes their numbers."""
    height, width = image.shape[:2]
    shorter = {"width": config.width, "height": config.height}
    shorter = {name: int(side / config.crop_fraction + 1e-6) for name, side in shorter.items()}
    if width / config.width <= height / config.height:
        size = (shorter["width"], int(shorter["width"] * height / width + 1e-6))
    else:
        size = (int(shorter["height"] * width / height + 1e-6), shorter["height"])
    whole = cv2.resize(image, size)
    top = round((size[1] - config.height) / 2.0)
    left = round((size[0] - config.width) / 2.0)
    return whole[top : top + config.height, left : left + config.width]


def reference(image, config):
    """The usual chain, step by step: resize, border, colour, float, normalise, transpose."""
    height, width = image.shape[:2]
    if config.resize == "stretch":
        whole = cv2.resize(image, (config.width, config.height))
    elif config.resize == "centre-crop":
        whole = cropped(image, config)
    else:
        scale = min(config.width / width, config.height / height)
        inner = cv2.resize(image, (round(width * scale), round(height * scale)))
        top = (config.height - inner.shape[0]) // 2
        left = (config.width - inner.shape[1]) // 2
        bottom, right = config.height - inner.shape[0] - top, config.width - inner.shape[1] - left
        fill = (config.pad_value,) * 3
        whole = cv2.copyMakeBorder(inner, top, bottom, left, right, cv2.BORDER_CONSTANT, value=fill)
    if config.color == "rgb":
        whole = whole[:, :, ::-1]
    if config.color == "grey":
        whole = cv2.cvtColor(whole, cv2.COLOR_BGR2GRAY)[:, :, None]
    values = (whole.astype(np.float64) * config.scale - config.mean) / config.std
    return values[None] if config.layout == "nhwc" else values.transpose(2, 0, 1)[None]


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize(
    "size", [(180, 320), (333, 217), (64, 64), (40, 96), (1080, 1920), (5, 400), (400, 5)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"resize": "stretch"},
        {"color": "bgr", "pad_value": 0},
        IMAGENET,
        {"scale": 1.0, "mean": (103.5, 116.3, 123.7), "color": "bgr", "resize": "stretch"},
        {"resize": "centre-crop", "crop_fraction": 0.875, **IMAGENET},
        {"resize": "centre-crop", "color": "grey", "mean": (0.13,), "std": (0.3,)},
        {"layout": "nhwc", **IMAGENET},
        {"layout": "nhwc", "color": "grey", "resize": "stretch"},
    ],
)
def test_input_equals_the_step_by_step_reference(size, options):
    config = PreprocessConfig(width=96, height=64, **options)
    image = random_image(*size)
    array, _ = preprocess(image, config)
    expected = reference(image, config)
    assert array.shape == expected.shape == config.input_shape
    assert array.dtype == np.float32
    # Absolute, for values up to 255: the reference is float64.
    np.testing.assert_allclose(array, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"color": "grey", "mean": (0.0,), "std": (1.0,)}])
def test_a_part_of_a_frame_that_fits_as_it_is_stays_as_it_is(options):
    config = PreprocessConfig(width=96, height=64, **options)
    frame = random_image(200, 300)
    before, part = frame.copy(), frame[10:50, 20:116]
    array, _ = preprocess(part, config)
    np.testing.assert_allclose(array, reference(part, config), rtol=1e-5, atol=2e-5)
    assert np.array_equal(frame, before)


def test_given_array_is_written_in_place_and_fully():
    config = PreprocessConfig(width=96, height=64)
    out = np.full((1, 3, 64, 96), np.nan, np.float32)
    array, _ = preprocess(random_image(180, 320), config, out)
    assert array is out
    assert np.isfinite(out).all()


def test_wrong_array_is_refused_with_both_shapes():
    config = PreprocessConfig(width=96, height=64)
    with pytest.raises(PipelineError, match=r"float32 \[1, 3, 64, 96\], not float64 \[3, 64, 96\]"):
        preprocess(random_image(9, 9), config, np.empty((3, 64, 96)))


@pytest.mark.parametrize("shape", [(9, 9), (9, 9, 4), (0, 9, 3)])
def test_array_that_is_not_an_image_is_refused(shape):
    with pytest.raises(PipelineError, match=r"uint8 \[H, W, 3\]"):
        preprocess(np.zeros(shape, np.uint8), PreprocessConfig(width=8, height=8))


def test_stream_of_changing_sizes_leaves_no_trace_of_earlier_frames():
    config = PreprocessConfig(width=96, height=64)
    stream = Preprocessor(config)
    for size in [(180, 320), (320, 180), (180, 320), (64, 64)]:
        image = random_image(*size)
        array, geometry = stream.run(image)
        fresh, fresh_geometry = preprocess(image, config)
        np.testing.assert_array_equal(array, fresh)
        assert geometry == fresh_geometry


def test_letterbox_maps_boxes_back_to_the_frame():
    _, geometry = preprocess(random_image(100, 200), PreprocessConfig(width=64, height=64))
    assert geometry == Geometry(0.32, 0.32, 0, 16)
    boxes = np.array([[0, 16, 64, 48], [32, 32, 48, 40]], np.float32)
    expected = [[0, 0, 200, 100], [100, 50, 150, 75]]
    np.testing.assert_allclose(geometry.to_frame(boxes), expected, atol=1e-4)


@pytest.mark.parametrize("size", [(2161, 3840), (333, 500), (7, 1000)])
def test_the_corners_of_a_letterbox_are_those_of_the_frame(size):
    config = PreprocessConfig(width=320, height=320)
    array, geometry = preprocess(np.full((*size, 3), 255, np.uint8), config)
    rows, columns = np.nonzero(array[0, 0] > 0.9)
    inner = np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float32)
    np.testing.assert_allclose(geometry.to_frame(inner), [[0, 0, size[1], size[0]]], rtol=1e-5)


def test_stretch_maps_boxes_back_to_the_frame():
    config = PreprocessConfig(width=64, height=64, resize="stretch")
    _, geometry = preprocess(random_image(100, 200), config)
    assert geometry == Geometry(0.32, 0.64)
    boxes = np.array([[0, 0, 64, 64], [32, 32, 48, 40]], np.float32)
    expected = [[0, 0, 200, 100], [100, 50, 150, 62.5]]
    np.testing.assert_allclose(geometry.to_frame(boxes), expected, atol=1e-4)


def test_object_is_found_again_where_it_was():
    image = np.zeros((123, 457, 3), np.uint8)
    image[40:80, 300:400] = 255
    for resize in ("letterbox", "stretch"):
        config = PreprocessConfig(width=320, height=320, resize=resize, pad_value=0)
        array, geometry = preprocess(image, config)
        rows, columns = np.nonzero(array[0, 0] > 0.5)
        box = [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]]
        back = geometry.to_frame(np.array(box, np.float32))
        np.testing.assert_allclose(back, [[300, 40, 400, 80]], atol=2.0)


@pytest.mark.parametrize("options", [{}, {"layout": "nhwc", "resize": "centre-crop"}])
def test_bytes_are_the_pixels_themselves(options):
    config = PreprocessConfig(width=96, height=64, dtype="uint8", scale=1.0, **options)
    image = random_image(180, 320)
    array, _ = preprocess(image, config)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, reference(image, config))


def test_halves_are_rounded_once():
    config = PreprocessConfig(width=96, height=64, dtype="float16", **IMAGENET)
    image = random_image(180, 320)
    array, _ = preprocess(image, config)
    assert array.dtype == np.float16
    # Two roundings would be off by a unit in the last place, 2^-11, now and then.
    np.testing.assert_allclose(array, reference(image, config), rtol=2**-11 * 1.01, atol=1e-6)


def test_a_crop_maps_boxes_back_to_the_frame():
    config = PreprocessConfig(width=224, height=224, resize="centre-crop", crop_fraction=0.875)
    _, geometry = preprocess(random_image(512, 1024), config)
    assert geometry == Geometry(0.5, 0.5, -144, -16)
    box = geometry.to_frame(np.array([[0, 0, 224, 224]], np.float32))
    np.testing.assert_allclose(box, [[288, 32, 736, 480]], atol=1e-3)


def test_one_number_stands_for_all_channels():
    one = PreprocessConfig(width=8, height=8, mean=(0.5,), std=(2.0,))
    assert one == PreprocessConfig(width=8, height=8, mean=(0.5,) * 3, std=(2.0,) * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.1, 0.2)}, "mean has 2 numbers, but rgb has 3 channels"),
        ({"color": "grey", "std": (1.0, 1.0, 1.0)}, "std has 3 numbers, but grey has 1"),
        ({"std": (1.0, 0.0, 1.0)}, "above 0"),
        ({"mean": (float("nan"),)}, "must be finite"),
        ({"crop_fraction": 0.9}, "only 'centre-crop' has a crop fraction"),
        ({"dtype": "uint8"}, "set scale to 1"),
    ],
)
def test_values_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(PreprocessingError, match=message):
        PreprocessConfig(width=8, height=8, **options)
