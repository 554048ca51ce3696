"""Antialiased resizes equal Pillow's, byte for byte, alone and as a network's input."""

import numpy as np
import pytest
from PIL import Image

from pipelines.config import PreprocessConfig
from pipelines.runtime.feed import DeviceFeed
from pipelines.stages.antialias import resize_part
from pipelines.stages.preprocess import inner_size, preprocess

FILTERS = {
    "pillow-bilinear": Image.Resampling.BILINEAR,
    "pillow-bicubic": Image.Resampling.BICUBIC,
}


def by_pillow(image, size, interpolation):
    """Columns, then rows: Pillow's own order to version 12; later ones may take rows first."""
    turned = Image.fromarray(image).resize((size[0], image.shape[0]), FILTERS[interpolation])
    return np.asarray(turned.resize(size, FILTERS[interpolation]))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("seed", range(30))
def test_every_byte_is_that_of_pillow(seed, interpolation):
    rng = np.random.default_rng(seed)
    height, width, rows, columns = (int(side) for side in rng.integers(1, 300, 4))
    image = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    if seed % 3 == 0:  # steps, where a cubic overshoots
        image = np.where(image > 127, 255, 0).astype(np.uint8)
    result = resize_part(image, (columns, rows), (0, 0, columns, rows), interpolation)
    np.testing.assert_array_equal(result, by_pillow(image, (columns, rows), interpolation))


@pytest.mark.parametrize("interpolation", FILTERS)
def test_a_part_is_cut_out_of_the_whole(interpolation):
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (108, 192, 3)).astype(np.uint8)
    whole = by_pillow(image, (45, 25), interpolation)
    part = resize_part(image, (45, 25), (11, 2, 22, 21), interpolation)
    np.testing.assert_array_equal(part, whole[2:23, 11:33])


@pytest.mark.parametrize("size", [(480, 640), (333, 217), (1080, 1920), (60, 90)])
def test_a_classifier_sees_what_torchvision_makes_of_a_picture(size):
    """Resize to 256, CenterCrop to 224, ToTensor, Normalize, said in Pillow and NumPy."""
    image = np.random.default_rng(2).integers(0, 256, (*size, 3)).astype(np.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    config = PreprocessConfig(
        width=224, height=224, resize="centre-crop", crop_fraction=0.875,
        interpolation="pillow-bilinear", mean=mean, std=std,
    )  # fmt: skip
    height, width = size
    shorter = min(size)
    resized = (int(256 * width / shorter), int(256 * height / shorter))
    picture = by_pillow(np.ascontiguousarray(image[..., ::-1]), resized, "pillow-bilinear")
    top, left = round((resized[1] - 224) / 2.0), round((resized[0] - 224) / 2.0)
    picture = picture[top : top + 224, left : left + 224]
    expected = ((picture / 255.0 - mean) / std).transpose(2, 0, 1)[None]
    array, _ = preprocess(image, config)
    np.testing.assert_allclose(array, expected, atol=1e-5)


def test_without_antialiasing_the_input_is_another():
    image = np.random.default_rng(3).integers(0, 256, (480, 640, 3)).astype(np.uint8)
    config = PreprocessConfig(width=64, height=64, resize="stretch")
    smooth = PreprocessConfig(
        width=64, height=64, resize="stretch", interpolation="pillow-bilinear"
    )
    plain, fine = preprocess(image, config)[0], preprocess(image, smooth)[0]
    assert np.abs(plain - fine).max() > 0.3
    assert fine.std() < 0.5 * plain.std()  # noise is averaged


class Target:
    """Takes what a feed gives the GPU."""

    def put(self, row, pixels, place):
        self.pixels, self.place = pixels, place


def test_the_kernel_of_frames_is_given_pictures_that_are_resized_already():
    config = PreprocessConfig(
        width=64, height=64, resize="centre-crop", interpolation="pillow-bicubic"
    )
    image = np.random.default_rng(4).integers(0, 256, (120, 200, 3)).astype(np.uint8)
    target = Target()
    DeviceFeed(config, target).put(0, image)
    inner = inner_size(120, 200, config)
    np.testing.assert_array_equal(target.pixels.rows, by_pillow(image, inner, "pillow-bicubic"))
    assert (target.place.inner_width, target.place.inner_height) == inner
    assert target.pixels.pixels == "bgr"
