"""Calibration data on disk: order, limits, what is skipped and what is refused."""

import io
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibration.dataset import InputSpec, Skipped, memory_dataset, open_dataset
from calibration.errors import CalibrationError
from device.errors import SourceError

SPEC = InputSpec("images", (1, 3, 2, 2))
OTHER = InputSpec("mask", (1, 5), "int64")


def load(path):
    """A picture here is a file with one number; b"bad" stands for one that cannot be decoded."""
    content = path.read_bytes()
    if content == b"bad":
        raise SourceError(f"{path}: not a picture")
    return np.full((3, 2, 2), float(content), np.float32)


def values(dataset):
    return [float(sample["images"].flat[0]) for sample in dataset]


@pytest.fixture
def image_folder(tmp_path):
    for name, content in [("b.png", b"2"), ("a.JPG", b"1"), ("sub/c.png", b"3"), (".d.png", b"9")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "labels.txt").write_text("cat")
    return tmp_path


def numbered(count, *shape):
    """An array of `count` rows that hold 0, 1, 2, ..."""
    rows = np.arange(count, dtype=np.float32).reshape(-1, *[1] * len(shape))
    return np.ascontiguousarray(np.broadcast_to(rows, (count, *shape)))


def test_images_come_in_the_order_of_their_names_with_a_batch_axis(image_folder):
    dataset = open_dataset(image_folder, load, [SPEC])
    assert values(dataset) == [1.0, 2.0, 3.0]
    assert len(dataset) == dataset.requested == 3
    assert next(iter(dataset))["images"].shape == (1, 3, 2, 2)


def test_a_data_set_can_be_read_again(image_folder):
    dataset = open_dataset(image_folder, load, [SPEC])
    assert values(dataset) == values(dataset)


def test_images_are_loaded_one_at_a_time(image_folder):
    loaded = []
    dataset = open_dataset(
        image_folder, lambda path: loaded.append(path.name) or load(path), [SPEC]
    )
    assert loaded == []
    next(iter(dataset))
    assert loaded == ["a.JPG"]


def test_unreadable_images_are_named_and_skipped_in_each_pass(image_folder):
    (image_folder / "b.png").write_bytes(b"bad")
    dataset = open_dataset(image_folder, load, [SPEC])
    for _ in range(2):
        assert values(dataset) == [1.0, 3.0]
        assert [skipped.name for skipped in dataset.skipped] == ["b.png"]
        assert "not a picture" in dataset.skipped[0].reason


def test_if_no_image_is_readable_that_is_an_error(image_folder):
    for path in image_folder.rglob("*.*[gG]"):
        path.write_bytes(b"bad")
    with pytest.raises(CalibrationError, match=r"none of 3 calibration samples.*a\.JPG"):
        list(open_dataset(image_folder, load, [SPEC]))


def test_a_mistake_in_the_preprocessing_is_not_taken_for_an_unreadable_image(image_folder):
    def broken(_path):
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        list(open_dataset(image_folder, broken, [SPEC]))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((3, 4, 4), np.float32), r"float32 of shape \[3, 4, 4\].*\[1, 3, 2, 2\]"),
        (np.zeros((3, 2, 2)), "is float64 of shape.*takes float32"),
        (np.zeros((2, 3, 2, 2), np.float32), r"shape \[2, 3, 2, 2\]"),
        (np.full((3, 2, 2), np.nan, np.float32), "12 NaN and 0 infinite of 12"),
    ],
)
def test_an_image_that_does_not_fit_the_input_is_named(image_folder, pixels, message):
    with pytest.raises(CalibrationError, match=rf"a\.JPG.*{message}"):
        list(open_dataset(image_folder, lambda _: pixels, [SPEC]))


@pytest.mark.parametrize("limit", [1, 3, 7, 10])
def test_a_limit_spreads_over_the_whole_data(tmp_path, limit):
    for part in range(5):
        np.save(tmp_path / f"{part}.npy", numbered(2, 3, 2, 2) + 2 * part)
    dataset = open_dataset(tmp_path, None, [SPEC], limit)
    assert values(dataset) == [number * 10 // limit for number in range(limit)]
    assert len(dataset) == limit


def test_more_samples_asked_than_there_are_is_visible(image_folder):
    dataset = open_dataset(image_folder, load, [SPEC], 500)
    assert (dataset.requested, len(dataset)) == (500, 3)


@pytest.mark.parametrize(
    ("shape", "spec_shape", "samples", "rest"),
    [
        ((3, 2, 2), (1, 3, 2, 2), 1, 0),
        ((1, 3, 2, 2), (1, 3, 2, 2), 1, 0),
        ((4, 3, 2, 2), (1, 3, 2, 2), 4, 0),
        ((4, 3, 2, 2), (None, 3, None, None), 4, 0),
        ((4, 1, 3, 2, 2), (1, 3, 2, 2), 4, 0),
        ((7, 3, 2, 2), (2, 3, 2, 2), 3, 1),
    ],
)
def test_an_array_is_cut_into_samples(tmp_path, shape, spec_shape, samples, rest):
    path = tmp_path / "data.npy"
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    np.save(path, array)
    dataset = open_dataset(path, None, [InputSpec("images", spec_shape)])
    images = [sample["images"] for sample in dataset]
    assert [one.shape for one in images] == [(spec_shape[0] or 1, 3, 2, 2)] * samples
    used = np.concatenate(images).reshape(-1)
    assert np.array_equal(used, array.reshape(-1)[: used.size])
    left_out = (Skipped("data.npy", f"its last {rest} rows do not fill a batch"),)
    assert dataset.skipped == (left_out if rest else ())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("limit", [None, 2])
def test_the_members_of_an_npz_file_feed_the_inputs_they_are_named_after(tmp_path, save, limit):
    images, mask = numbered(5, 3, 2, 2), np.arange(25).reshape(5, 5)
    save(tmp_path / "x.npz", images=images, mask=mask, unused=np.ones(3))
    result = list(open_dataset(tmp_path, None, [SPEC, OTHER], limit))
    chosen = [0, 2] if limit else range(5)
    assert [sample["images"].flat[0] for sample in result] == [float(i) for i in chosen]
    assert [sample["mask"].tolist() for sample in result] == [[mask[i].tolist()] for i in chosen]


def _npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_npy(np.zeros((1, 3, 2, 2))), "float64 of shape"),
        (_npy(np.zeros((1, 3, 2, 2), ">f4")), ">f4 of shape"),
        (_npy(np.zeros((1, 3, 5, 2), np.float32)), r"\[1, 3, 5, 2\]"),
        (_npy(np.asfortranarray(np.zeros((1, 3, 2, 2), np.float32))), "column by column"),
        (_npy(np.zeros((0, 3, 2, 2), np.float32)), "holds no whole sample"),
        (_npy(np.zeros((4, 3, 2, 2), np.float32))[:-1], "damaged.*191 bytes.*needs 192"),
        (_npy(np.array([{}], dtype=object)), "it holds object, which is no plain type: pickles"),
        (b"", "damaged"),
        (b"\x93NUMPY\x01\x00\xff\xff", "damaged"),
    ],
)
def test_an_array_file_that_does_not_fit_is_named_when_it_is_opened(tmp_path, content, message):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as caught:
        open_dataset(tmp_path / "x.npy", None, [SPEC])
    assert "x.npy" in str(caught.value)


def _npy_that_says(shape, held):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * held


@pytest.mark.parametrize("shape", [(99999999999, 3, 2, 2), (-1, 3, -2, 2), (-1, 3, 2, 2)])
def test_a_header_that_promises_what_is_not_there_is_refused_before_it_is_reserved(tmp_path, shape):
    (tmp_path / "x.npy").write_bytes(_npy_that_says(shape, 48))
    with pytest.raises(CalibrationError, match="damaged"):
        open_dataset(tmp_path / "x.npy", None, [InputSpec("images", (None, 3, None, None))])


def test_a_member_that_is_shorter_than_its_archive_says_is_damaged(tmp_path):
    path = tmp_path / "x.npz"
    member = _npy_that_says((2, 3, 2, 2), 48)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", member)
    content = bytearray(path.read_bytes())
    size = content.rindex(b"PK\x01\x02") + 24  # the length in the central directory
    content[size : size + 4] = struct.pack("<I", len(member) + 48)
    path.write_bytes(content)
    dataset = open_dataset(path, None, [SPEC])
    with pytest.raises(CalibrationError, match=r"sample 1 is damaged .0 of 48 bytes"):
        list(dataset)


def test_numbers_that_are_not_finite_are_named_with_file_and_sample(tmp_path):
    array = numbered(4, 3, 2, 2)
    array[2, 0, 0, 0] = np.inf
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(CalibrationError, match=r"x\.npy.*sample 2 holds 0 NaN and 1 infinite"):
        list(open_dataset(tmp_path, None, [SPEC]))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.sampled_from(["x.npy", "x.npz"]))
def test_a_mutated_file_gives_samples_or_a_calibration_error(tmp_path, data, name):
    array = numbered(2, 3, 2, 2)
    buffer = io.BytesIO()
    if name == "x.npy":
        np.save(buffer, array)
    else:
        np.savez_compressed(buffer, images=array)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    (tmp_path / name).write_bytes(content)
    try:
        result = list(open_dataset(tmp_path / name, None, [SPEC]))
    except CalibrationError:
        return
    assert all(sample["images"].shape == (1, 3, 2, 2) for sample in result)


def test_an_npz_file_without_an_input_lists_what_it_has(tmp_path):
    np.savez(tmp_path / "x.npz", image=numbered(1, 3, 2, 2))
    with pytest.raises(CalibrationError, match=r"'images' is missing among \['image.npy'\]"):
        open_dataset(tmp_path, None, [SPEC])


def test_inputs_with_different_numbers_of_samples_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", images=numbered(3, 3, 2, 2), mask=np.zeros((4, 5), np.int64))
    with pytest.raises(CalibrationError, match="3 of 'images', 4 of 'mask'"):
        open_dataset(tmp_path, None, [SPEC, OTHER])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no picture, .npy or .npz files of 0"),
        (["readme.txt"], "no picture, .npy or .npz files of 1"),
        (["a.png", "b.npy", "c.npy"], "2 .npy, 1 picture files of 3"),
    ],
)
def test_a_folder_without_one_kind_of_data_is_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_bytes(b"1")
    with pytest.raises(CalibrationError, match=message):
        open_dataset(tmp_path, load, [SPEC])


def test_what_is_missing_is_said(image_folder):
    with pytest.raises(CalibrationError, match="no such calibration data"):
        open_dataset(image_folder / "none", load, [SPEC])
    with pytest.raises(CalibrationError, match="nothing says how to preprocess"):
        open_dataset(image_folder, None, [SPEC])
    with pytest.raises(CalibrationError, match="feed one input, but the model has 2"):
        open_dataset(image_folder, load, [SPEC, OTHER])
    with pytest.raises(CalibrationError, match="limit is 0"):
        open_dataset(image_folder, load, [SPEC], 0)


def test_the_hash_follows_names_bytes_and_choice_and_nothing_else(image_folder, tmp_path):
    def digest(limit=None):
        return open_dataset(image_folder, load, [SPEC], limit).sha256()

    whole = digest()
    (image_folder / "labels.txt").write_text("dog")
    assert digest() == whole
    seen = {whole, digest(2)}
    (image_folder / "b.png").write_bytes(b"4")
    seen.add(digest())
    (image_folder / "b.png").write_bytes(b"2")
    assert digest() == whole
    (image_folder / "b.png").rename(image_folder / "b2.png")
    seen.add(digest())
    assert len(seen) == 4


def test_the_hash_tells_which_samples_of_a_file_were_chosen(tmp_path):
    np.save(tmp_path / "x.npy", numbered(4, 3, 2, 2))
    limits = (1, 2, 3, 4)
    assert len({open_dataset(tmp_path, None, [SPEC], limit).sha256() for limit in limits}) == 4


def test_arrays_in_memory_are_a_data_set_too():
    samples = [{"images": np.ones((1, 2), np.float32)}, {"images": np.zeros((1, 2), np.float32)}]
    dataset = memory_dataset(samples)
    assert len(dataset) == dataset.requested == len(list(dataset)) == 2
    assert dataset.sha256() == memory_dataset(samples).sha256()
    assert dataset.sha256() != memory_dataset(samples[::-1]).sha256()
    with pytest.raises(CalibrationError, match="'x' of sample 0 holds 1 NaN"):
        list(memory_dataset([{"x": np.array([np.nan])}]))


def test_an_encrypted_member_is_a_calibration_error(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, images=numbered(1, 3, 2, 2))
    content = bytearray(path.read_bytes())
    central = content.rindex(b"PK\x01\x02")
    content[central + 8] |= 1  # the flag of an encrypted member, in both of its headers
    content[6] |= 1
    path.write_bytes(content)
    assert zipfile.ZipFile(path).infolist()[0].flag_bits & 1
    with pytest.raises(CalibrationError, match="damaged"):
        open_dataset(path, None, [SPEC])
