"""The table's file: exact, canonical, whole or not at all, and safe to read."""

import json
import math
import re
from decimal import ROUND_HALF_EVEN, Context, Decimal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from calibration.errors import CalibrationError
from calibration.table import (
    MAX_AMAX,
    MIN_AMAX,
    Adjustments,
    CalibrationTable,
    decode_table,
    encode_table,
    read_table,
    rounded,
    scale_of,
    write_table,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)


@st.composite
def tables(draw):
    """Any table, with and without what came later."""
    tensors = draw(st.dictionaries(NAMES, st.floats(MIN_AMAX, MAX_AMAX), max_size=8))
    some = draw(st.lists(st.sampled_from(sorted(tensors)), unique=True)) if tensors else []
    dummy = draw(st.booleans())
    return CalibrationTable(
        method=draw(NAMES),
        samples=draw(st.integers(0 if dummy else 1, 2**40)),
        data_sha256=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        model_sha256=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        tensors=tensors,
        methods={name: draw(NAMES) for name in some},
        keep_float=tuple(draw(st.lists(NAMES, unique=True, max_size=4))),
        dummy=dummy,
        **draw(adjustments()),
    )


@st.composite
def adjustments(draw):
    """What makes a table of format 2, or nothing."""
    factors = st.lists(st.floats(0, exclude_min=True, allow_infinity=False), min_size=1, max_size=4)
    changes = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4)
    equalised = draw(st.dictionaries(NAMES, factors.map(tuple), max_size=3))
    biases = draw(st.dictionaries(NAMES, changes.map(tuple), max_size=3))
    if not equalised and not biases:
        return {}
    return {"format": 2, "adjusted": Adjustments(equalised=equalised, biases=biases)}


def _table(**tensors):
    return CalibrationTable(
        method="entropy",
        samples=3,
        data_sha256="a" * 64,
        model_sha256="b" * 64,
        tensors=tensors or {"images": 1.0, "conv1:0": 0.1 + 0.2},
    )


def _file(**changes):
    content = json.loads(encode_table(_table()))
    content.update(changes)
    return json.dumps({key: value for key, value in content.items() if value != "left out"})


@settings(deadline=None)
@given(tables())
def test_a_table_survives_its_file_to_the_last_bit(table):
    assert decode_table(encode_table(table), "x") == table


def test_a_written_file_is_read_back_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "calibration.json"
    write_table(path, _table(x=1.0))
    write_table(path, _table())
    assert read_table(path) == _table()
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.json"]


def test_who_reads_while_a_table_is_written_sees_the_whole_old_one(tmp_path):
    path = tmp_path / "calibration.json"
    write_table(path, _table())
    with path.open("rb") as reader:
        write_table(path, _table(x=2.0))
        assert decode_table(reader.read(), "x") == _table()
    assert read_table(path) == _table(x=2.0)


def test_equal_tables_give_equal_bytes_whatever_the_order_of_their_tensors():
    one, second = _table(a=1.0, b=2.0), _table(b=2.0, a=1.0)
    assert encode_table(one) == encode_table(second)


def test_the_file_is_plain_json_with_amax_in_decimal():
    content = json.loads(encode_table(_table()))
    assert content["tensors"] == {"conv1:0": 0.30000000000000004, "images": 1.0}
    assert content["format"] == 1


def test_a_table_without_adjustments_does_not_speak_of_them():
    assert b"adjusted" not in encode_table(_table())


def test_each_row_of_adjustments_is_one_line():
    rows = {"[1,\n2]": (0.5, 1.25, 3e-7), "b": (1.0,)}
    table = structs.replace(_table(), format=2, adjusted=Adjustments(equalised=rows))
    lines = encode_table(table).decode().splitlines()
    assert [line.strip() for line in lines if "0.5" in line] == ['"[1,\\n2]": [ 0.5, 1.25, 3e-7 ],']
    assert json.loads(encode_table(table))["adjusted"]["equalised"]["b"] == [1.0]


@given(st.floats(1e-300, 1e300), st.sampled_from([1, -1]), st.integers(1, 6))
def test_rounded_numbers_are_the_nearest_of_so_many_digits(size, sign, digits):
    (short,) = rounded([sign * size], digits)
    # The nearest decimal by exact arithmetic.
    exact = Context(prec=digits, rounding=ROUND_HALF_EVEN).create_decimal(Decimal(sign * size))
    assert short == float(exact)


def test_scale_is_amax_over_127():
    assert scale_of(127.0) == 1.0
    assert _table().scale("images") == 1 / 127


def test_a_missing_tensor_is_named():
    with pytest.raises(CalibrationError, match="no tensor 'conv2' among its 2"):
        _table().amax("conv2")


@pytest.mark.parametrize("amax", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e39])
def test_an_amax_without_a_float32_scale_is_refused(amax):
    with pytest.raises(CalibrationError, match="amax of tensor 'x'"):
        _table(x=amax)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 6}, "format 6, but this version reads formats 1 to 5"),
        ({"format": 3}, "format 3, but has no adjustments of weights, no preprocessing"),
        ({"preprocessing": {}}, "format 1, but has no adjustments of weights, a preprocessing"),
        ({"format": 3, "preprocessing": {"resize": "fold"}}, "resize"),
        ({"format": 3, "preprocessing": {"mean": [0, 1]}}, "mean has 2 numbers, but rgb has 3"),
        ({"format": 2}, "format 2, but has no adjustments"),
        ({"adjusted": {"biases": {"n": [1.0]}}}, "format 1, but has adjustments"),
        ({"format": 2, "adjusted": None}, "adjusted"),
        ({"format": 2, "adjusted": {}}, "name no tensor and no node"),
        ({"format": 2, "adjusted": {"colour": {}}}, "colour"),
        ({"format": 2, "adjusted": {"equalised": {"t": []}}}, "no factor of tensor 't'"),
        ({"format": 2, "adjusted": {"equalised": {"t": [1, 0.0]}}}, "'t' in channel 1 is 0.0"),
        ({"format": 2, "adjusted": {"equalised": {"t": [-2.0]}}}, "finite and positive"),
        ({"format": 2, "adjusted": {"biases": {"": [1.0]}}}, "adjusted"),
        ({"format": "left out"}, "format"),
        ({"format": True}, "format"),
        ({"samples": 0}, "samples"),
        ({"samples": "left out"}, "samples"),
        ({"method": ""}, "method"),
        ({"data_sha256": "A" * 64}, "data_sha256"),
        ({"model_sha256": "a" * 64 + "\n"}, "model_sha256"),
        ({"tensors": {"x": "1"}}, "tensors"),
        ({"tensors": {"x": None}}, "tensors"),
        ({"tensors": {"x": -2.0}}, "tensor 'x' is -2.0"),
        ({"tensors": []}, "tensors"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_file(changes, message):
    with pytest.raises(CalibrationError, match=re.escape(message)) as caught:
        decode_table(_file(**changes).encode(), "my/table.json")
    assert str(caught.value).startswith("my/table.json: ")
    assert "\n" not in str(caught.value)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_mutated_file_is_a_table_or_a_calibration_error(data):
    content = bytearray(encode_table(_table()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        content = content or bytearray(b"\0")
    try:
        table = decode_table(bytes(content), "x")
    except CalibrationError:
        return
    assert decode_table(encode_table(table), "x") == table


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"format":1,"tensors":' + b'{"a":' * 100_000, b"null"],
)
def test_what_is_not_a_table_is_a_calibration_error(content):
    with pytest.raises(CalibrationError, match="not a calibration table"):
        decode_table(content, "x")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CalibrationError, match=r"none\.json: cannot read"):
        read_table(tmp_path / "none.json")


def test_a_failed_write_names_the_path_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    write_table(path, _table())

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CalibrationError, match=r"calibration\.json: cannot write.*No space left"):
        write_table(path, _table(x=2.0))
    assert read_table(path) == _table()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("folder", ["none", "file"])
def test_a_path_that_cannot_be_written_is_a_calibration_error(tmp_path, folder):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CalibrationError, match="cannot write"):
        write_table(tmp_path / folder / "table.json", _table())


def test_tables_are_frozen():
    with pytest.raises(AttributeError):
        _table().samples = 4
    assert msgspec.structs.replace(_table(), samples=4).samples == 4


def test_a_file_from_before_methods_per_tensor_still_loads():
    content = json.loads(_file(methods="left out", keep_float="left out", dummy="left out"))
    assert sorted(content) == [
        "data_sha256", "format", "method", "model_sha256", "samples", "tensors",
    ]  # fmt: skip
    assert decode_table(json.dumps(content).encode(), "x") == _table()


def test_a_dummy_says_so_in_its_file():
    table = msgspec.structs.replace(_table(), dummy=True, samples=0)
    assert json.loads(encode_table(table))["dummy"] is True
    assert decode_table(encode_table(table), "x").dummy
