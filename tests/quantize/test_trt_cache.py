"""TensorRT caches: exact to the byte, as TensorRT writes and reads them, and safe to read."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.errors import CalibrationError
from calibration.table import MAX_AMAX, MIN_AMAX, CalibrationTable
from calibration.trt_cache import (
    TensorRTCache,
    amax_of,
    cache_of,
    cache_version,
    cache_warning,
    decode_cache,
    encode_cache,
    write_cache,
)

NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1, max_size=12
)
SCALES = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False, width=32)
CACHES = st.builds(
    TensorRTCache,
    version=st.sampled_from(["8001", "8502", "8510", "100300", "8XXX"]),
    algorithm=st.sampled_from(["EntropyCalibration2", "MinMaxCalibration"]),
    scales=st.dictionaries(NAMES, SCALES, max_size=8),
)
HEADER = "TRT-100300-EntropyCalibration2"


def as_trtexec_reads(text: str) -> dict[str, float]:
    """The tensors of a cache as NVIDIA's own readers find them, written a second time.

    A line at a time, the name up to the last colon, eight characters from two behind it.
    """
    results = {}
    for line in text.split("\n")[1:]:
        if line:
            colon = line.rfind(":")
            bits = int(line[colon + 2 : colon + 10], 16)
            results[line[:colon]] = struct.unpack("!f", struct.pack("!I", bits))[0]
    return results


@settings(max_examples=100)
@given(CACHES)
def test_a_cache_survives_its_text_and_another_reader(cache: TensorRTCache) -> None:
    text = encode_cache(cache)
    read = decode_cache(text, "x")
    assert read == cache
    assert list(read.scales) == list(cache.scales)
    assert encode_cache(read) == text
    assert as_trtexec_reads(text) == dict(cache.scales)


@settings(max_examples=100)
@given(CACHES)
def test_ranges_give_the_same_bytes_back(cache: TensorRTCache) -> None:
    again = cache_of(amax_of(cache), cache.version, cache.algorithm)
    assert encode_cache(again) == encode_cache(cache)


@settings(max_examples=100)
@given(st.dictionaries(NAMES, st.floats(MIN_AMAX, MAX_AMAX), max_size=8))
def test_ranges_keep_their_float32_scale_and_are_fixed_from_then_on(amax: dict[str, float]) -> None:
    once = amax_of(decode_cache(encode_cache(cache_of(amax, "8502")), "x"))
    assert list(once) == list(amax)
    for name, value in amax.items():
        assert np.float32(once[name] / 127) == np.float32(value / 127)
        assert abs(once[name] - value) <= value * 2.0**-23
    assert amax_of(decode_cache(encode_cache(cache_of(once, "8502")), "x")) == once


def test_any_float32_scale_comes_back_through_a_table(rng: np.random.Generator) -> None:
    bits = rng.integers(0x00800000, 0x7C000000, 2000, dtype=np.uint32)
    scales = {f"t{i}": float(s) for i, s in enumerate(bits.view(np.float32))}
    cache = TensorRTCache("100300", "EntropyCalibration2", scales)
    table = CalibrationTable(
        method="entropy",
        samples=1,
        data_sha256="a" * 64,
        model_sha256="b" * 64,
        tensors=amax_of(cache),
    )
    assert cache_of(table.tensors, "100300") == cache


def test_the_text_is_what_tensorrt_writes() -> None:
    amax = {"images": 1.0, "input_tensor_0": 128.0, "a:0": 127.0 * 2.0**-118}
    assert encode_cache(cache_of(amax, cache_version("10.3.0"))) == (
        "TRT-100300-EntropyCalibration2\n"
        "images: 3c010204\n"
        "input_tensor_0: 3f810204\n"
        "a:0: 04800000\n"
    )


def test_what_other_writers_leave_is_read() -> None:
    text = (
        "TRT-8XXX-MinMaxCalibration \r\n"
        "scope/conv:0: 4800000\t\r\n"  # a leading zero lost
        "\n"
        "(Unnamed Layer* 4) [Fully Connected]_output: 3D65992F\r\n"
        "a: b: 1\n"
        " blanks :3c010204  "
    )
    cache = decode_cache(text, "x")
    assert (cache.version, cache.algorithm) == ("8XXX", "MinMaxCalibration")
    assert dict(cache.scales) == {
        "scope/conv:0": 2.0**-118,
        "(Unnamed Layer* 4) [Fully Connected]_output": struct.unpack("!f", b"\x3d\x65\x99\x2f")[0],
        "a: b": 2.0**-149,
        " blanks ": float(np.float32(1 / 127)),
    }


@pytest.mark.parametrize("algorithm", ["EntropyCalibration", "LegacyCalibration"])
def test_old_algorithms_are_read_but_not_written(algorithm: str) -> None:
    cache = decode_cache(f"TRT-7103-{algorithm}\nx: 3c010204\n", "x")
    assert cache.algorithm == algorithm
    with pytest.raises(CalibrationError, match=f"not for {algorithm}"):
        encode_cache(cache)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x: 7fc00000", "line 3: the scale of tensor 'x' is nan"),
        ("x: 7f800000", "line 3: the scale of tensor 'x' is inf"),
        ("x: bc010204", "line 3: the scale of tensor 'x' is -0.007"),
        ("x: 80000000", "line 3: the scale of tensor 'x' is -0.0"),
        ("x: 0", "line 3: the scale of tensor 'x' is 0.0"),
        ("a:b: 3c010204", "line 3: tensor 'a:b' has a scale on line 2 already"),
        ("x: 3c0102045", "line 3: found 'x: 3c0102045'"),
        ("x: 0x3c010204", "line 3: found"),
        ("x: 1.0", "line 3: found 'x: 1.0'"),
        ("x: ", "line 3: found 'x:'"),
        ("x 3c010204", "line 3: found 'x 3c010204'"),
        (": 3c010204", "line 3: a TensorRT cache cannot hold a tensor named ''"),
        ("a\rb: 3c010204", r"line 3: a TensorRT cache cannot hold a tensor named 'a\\rb'"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    text = f"{HEADER}\na:b: 3c010204\n{line}\n"
    with pytest.raises(CalibrationError, match=f"^my.cache, {message}") as caught:
        decode_cache(text, "my.cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n" + HEADER,
        "TRT-850-EntropyCalibration2\n",
        "TRT-85020-EntropyCalibration2\n",
        "TRT-8502-Entropycalibration2\n",
        "TRT-8502-EntropyCalibration2x\n",
        "TRT-٨502-EntropyCalibration2\n",
        "x 1.0\n",
        '{"tensors": {}}',
    ],
)
def test_a_wrong_header_is_named(text: str) -> None:
    with pytest.raises(CalibrationError, match=r"^my\.cache, line 1: found"):
        decode_cache(text, "my.cache")


@settings(max_examples=150)
@given(st.data())
def test_a_mutated_text_is_a_cache_or_a_calibration_error(data: st.DataObject) -> None:
    text = f"{HEADER}\nimages: 3c010204\r\na:0: 4800000\n"
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at] + data.draw(st.text(max_size=4)) + text[at + data.draw(st.integers(0, 3)) :]
        )
    try:
        cache = decode_cache(text, "x")
    except CalibrationError:
        return
    assert all(0 < scale < math.inf for scale in cache.scales.values())
    if cache.algorithm.startswith(("EntropyCalibration2", "MinMax")):
        assert decode_cache(encode_cache(cache), "x") == cache


@pytest.mark.parametrize("name", ["", "a\nb", "a\rb", "\n", "a\ud800"])
def test_a_name_that_no_line_can_hold_is_refused(name: str) -> None:
    with pytest.raises(CalibrationError, match="cannot hold a tensor named"):
        cache_of({name: 1.0}, "8502")


@pytest.mark.parametrize("amax", [0.0, -1.0, math.nan, math.inf, 1e-44, 1e41])
def test_a_range_without_a_float32_scale_is_refused(amax: float) -> None:
    with pytest.raises(CalibrationError, match="the scale of tensor 'x' is"):
        cache_of({"x": amax}, "8502")


def test_a_scale_that_is_no_float32_is_refused() -> None:
    with pytest.raises(CalibrationError, match="float32"):
        TensorRTCache("8502", "MinMaxCalibration", {"x": 0.1})


@pytest.mark.parametrize(
    ("version", "algorithm"), [("8.5.2", "MinMaxCalibration"), ("8502", "Entropy")]
)
def test_a_header_that_cannot_be_is_refused(version: str, algorithm: str) -> None:
    with pytest.raises(CalibrationError, match="a TensorRT cache cannot have"):
        TensorRTCache(version, algorithm, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensorrt", "version"),
    [
        ("7.1.3", "7103"),
        ("8.0.1", "8001"),
        ("8.5.2.2", "8502"),
        ("8.5.10", "8510"),
        ("8.6", "8600"),
        ("10.3.0", "100300"),
        ("10.3.0.30", "100300"),
        ("10.7.0", "100700"),
        ("11.4.1", "110401"),
    ],
)
def test_versions_are_spelled_as_the_release_spells_them(tensorrt: str, version: str) -> None:
    assert cache_version(tensorrt) == version
    assert decode_cache(encode_cache(cache_of({"x": 1.0}, version)), "x").version == version


@pytest.mark.parametrize(
    "tensorrt", ["", "10", "8502", "v8.5", "10.3.0.30.1", "8.5.2\n", "8.100", "٨.5"]
)
def test_what_is_no_version_is_refused(tensorrt: str) -> None:
    for function in (cache_version, cache_warning):
        with pytest.raises(CalibrationError, match="is not a version of TensorRT"):
            function(tensorrt)


def test_releases_without_calibrators_are_warned_of() -> None:
    assert cache_warning("10.16.1") is None
    assert cache_warning("8.5.2") is None
    for tensorrt in ("11.0.0", "11.4.1", "12.0"):
        warning = cache_warning(tensorrt)
        assert warning is not None
        assert "Q/DQ" in warning


def test_a_written_file_is_read_back_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "calibration.cache"
    cache = cache_of({"à:0": 1.0, "b": 2.0}, "8502", "MinMaxCalibration")
    write_cache(path, cache_of({}, "8502"))
    write_cache(path, cache)
    assert decode_cache(path.read_text(), str(path)) == cache
    assert path.read_bytes() == encode_cache(cache).encode()
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.cache"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot write"):
        write_cache(tmp_path / "none" / "a.cache", cache_of({}, "8502"))
