"""What a bundle says of itself: inspect, verify and diff, against what a board really does."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from bundle_models import detector, write_model_bundle
from cli_fixtures import invoke
from click.testing import CliRunner
from fleet_fixtures import Fleet
from golden_fixtures import PIPELINE, engine_of

from device.update.bundle import extract_bundle, write_bundle
from device.update.part_file import Fetch
from toolkit.cli.main import tandem
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder
from toolkit.fleet.bundles.diff import Change, changes, fetch_bytes, flattened
from toolkit.fleet.trust.publish import publish_bundle
from toolkit.fleet.trust.repository import FleetRepository


def packed(
    folder: Path, engine: Path, *options: str, pipeline: str = PIPELINE, last: str = "class 9"
) -> Path:
    """Pack an engine as a user does; `folder` is new."""
    folder.mkdir()
    (folder / "pipeline.toml").write_text(pipeline)
    names = [*(f"class {n}" for n in range(9)), last]
    (folder / "labels.txt").write_text("\n".join(names))
    files = ("--pipeline", folder / "pipeline.toml", "--labels", folder / "labels.txt")
    out = folder / "out.bundle"
    result = invoke("bundle", engine, *files, "--portable", "--name", "m", "-o", out, *options)
    assert result.exit_code == 0, result.output
    return out


@dataclass(frozen=True)
class Files:
    """An engine, its bundle, and a bundle of the same network with other weights."""

    engine: Path
    first: Path
    second: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("bundles")
    engine = engine_of(folder / "one", 1)
    second = engine_of(folder / "other", 2)
    options = ("--metric", "top1=0.7", "--requires", "memory_mb=500", "--licence", "MIT")
    return Files(
        engine,
        packed(folder / "first", engine, *options),
        packed(folder / "second", second, "--version", "2"),
    )


# -- the command


def test_the_old_spelling_and_create_write_the_same_bytes(files: Files, tmp_path: Path) -> None:
    folder = files.second.parent
    options = ("--pipeline", folder / "pipeline.toml", "--labels", folder / "labels.txt")
    for words, out in (((), "old"), (("create",), "new")):
        result = invoke("bundle", *words, files.engine, *options, "-o", tmp_path / out)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "old").read_bytes() == (tmp_path / "new").read_bytes()
    options_first = invoke("bundle", *options, "-o", tmp_path / "first", files.engine)
    assert options_first.exit_code == 0, options_first.output
    for log in (("-q",), ("--log", str(tmp_path / "log"))):
        shown = CliRunner().invoke(tandem, ["bundle", *log, "inspect", str(tmp_path / "old")])
        assert shown.exit_code == 0, shown.output


def test_inspect_shows_what_the_bundle_holds_and_says(files: Files) -> None:
    result = invoke("bundle", "inspect", files.first, "--json")
    assert result.exit_code == 0, result.output
    view = json.loads(result.output)
    assert (view["name"], view["profile"], view["bytes"]) == (
        "m", "laptop", files.first.stat().st_size,
    )  # fmt: skip
    (engine,) = view["engines"]
    assert (engine["model"], engine["precision"]) == ("m.onnx", "fp32")
    assert engine["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["1", "3", "32", "32"]}]
    assert 0 < sum(engine["sizes"].values()) < engine["bytes"] == files.engine.stat().st_size
    assert view["pipeline"]["decoders"] == ["classification"]
    assert [len(names) for names in view["labels"].values()] == [10]
    assert (view["metrics"]["top1"], view["licence"]) == (0.7, "MIT")
    assert view["measured_by"]["top1"] == "stated with `tandem bundle --metric`"
    assert view["measured_by"]["predicted_latency_ms"].startswith("predicted, not measured")
    assert view["hashes"] == {"model": engine["model_sha256"]}
    assert view["signature"] is None  # it lies in no repository
    shown = invoke("bundle", "inspect", files.first).output
    assert "m 0.1.0 for laptop" in shown
    assert "memory_mb 500" in shown


def test_a_password_in_a_camera_address_is_not_shown(files: Files, tmp_path: Path) -> None:
    secret = PIPELINE.replace("v4l2:///dev/video0", "rtsp://joe:swordfish@camera/1")
    bundle = packed(tmp_path / "secret", files.engine, pipeline=secret)
    for arguments in (("inspect", bundle), ("inspect", bundle, "--json"),
                      ("diff", files.first, bundle)):  # fmt: skip
        output = invoke("bundle", *arguments).output
        assert "rtsp://***@camera/1" in output.replace("\n", "")
        assert "swordfish" not in output


# -- verify


def test_verify_passes_a_good_bundle_and_names_what_is_wrong(files: Files, tmp_path: Path) -> None:
    good = invoke("bundle", "verify", files.first)
    assert good.exit_code == 0, good.output
    broken = tmp_path / "broken.bundle"
    data = bytearray(files.first.read_bytes())
    data[data.index(b"class 5")] ^= 1
    broken.write_bytes(data)
    bad = invoke("bundle", "verify", broken, "--json")
    assert bad.exit_code == 1
    (check,) = json.loads(bad.output)
    assert check["name"] == "hashes"
    assert "labels.txt" in check["detail"]


def test_verify_runs_the_engines_own_checks(tmp_path: Path) -> None:
    """Every hash fits, and the engine is none: safetensors without a manifest."""
    chance = np.random.default_rng(1)
    bundle = write_model_bundle(tmp_path / "m.bundle", detector(chance, blocks=1))
    result = invoke("bundle", "verify", bundle, "--json")
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.output)}
    assert checks["hashes"]["passed"]
    assert not checks["model.engine"]["passed"]
    assert "not an engine" in checks["model.engine"]["detail"]
    assert not checks["pipeline.toml"]["passed"]


def test_verify_refuses_an_engine_for_another_profile_than_the_bundle_says(
    files: Files, tmp_path: Path
) -> None:
    folder = files.first.parent
    bundle = tmp_path / "other.bundle"
    write_bundle(
        bundle, engine=files.engine, pipeline=folder / "pipeline.toml",
        labels=folder / "labels.txt", name="m", version="1", profile="agx-orin-64gb",
    )  # fmt: skip
    result = invoke("bundle", "verify", bundle, "--json")
    assert result.exit_code == 1
    details = [check["detail"] for check in json.loads(result.output) if not check["passed"]]
    assert details == [
        "model.engine is built for laptop, the bundle says agx-orin-64gb: pack it again"
    ]


def test_what_cannot_be_read_is_status_2(files: Files, tmp_path: Path) -> None:
    assert invoke("bundle", "verify", tmp_path / "missing").exception.exit_status == 2  # type: ignore[union-attr]
    (tmp_path / "text").write_text("no bundle")
    assert invoke("bundle", "verify", tmp_path / "text").exit_code == 1
    for pair in ((files.first, tmp_path / "missing"), (tmp_path / "text", files.first)):
        assert invoke("bundle", "diff", *pair).exception.exit_status == 2  # type: ignore[union-attr]
    alone = invoke("bundle", "verify", files.first, "--repository", str(tmp_path))
    assert (alone.exit_code, "give --trust, too" in alone.output) == (2, True)
    nowhere = invoke("bundle", "verify", files.first, "--trust", str(tmp_path))
    assert (nowhere.exit_code, "lies in no signed repository" in nowhere.output) == (2, True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Fleet:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    publish_bundle(FleetRepository(fleet.folder), files.first)
    return fleet


def published(fleet: Fleet) -> Path:
    (path,) = (fleet.served / "targets/m").rglob("*.bundle")
    return path


def test_the_signature_of_a_published_bundle_is_shown_and_verified(
    files: Files, fleet: Fleet
) -> None:
    view = json.loads(invoke("bundle", "inspect", published(fleet), "--json").output)
    assert view["signature"]["target"] == "m/0.1.0/laptop.bundle"
    assert view["signature"]["verified"] is False
    assert "not verified here" in " ".join(
        invoke("bundle", "inspect", published(fleet)).output.split()
    )
    for trust in (fleet.trust, fleet.trust / "root.json"):
        result = invoke("bundle", "verify", published(fleet), "--trust", trust, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)[-1]["name"] == "signature"
    elsewhere = invoke(
        "bundle", "verify", files.first, "--trust", fleet.trust, "--repository", fleet.served
    )
    assert elsewhere.exit_code == 0, elsewhere.output


@pytest.mark.parametrize("harm", ["stranger", "other bytes", "not published", "damaged list"])
def test_a_signature_that_does_not_lead_to_these_bytes_is_refused(
    harm: str, files: Files, fleet: Fleet, tmp_path: Path
) -> None:
    copied = fleet.copied(tmp_path / "copied")
    bundle, trust = published(copied), copied.trust
    says = "signature"
    if harm == "stranger":
        trust = Fleet(tmp_path / "stranger", root_keys=1, threshold=1).trust
    elif harm == "other bytes":
        shutil.copy(packed(tmp_path / "x", files.engine, "--metric", "top1=0.9"), bundle)
        says = "it is another file"
    elif harm == "not published":
        shutil.copy(files.second, bundle)
        says = "was not published"
    else:
        (listed,) = (copied.served / "metadata").glob("3.targets.json")
        listed.write_bytes(listed.read_bytes().replace(b"laptop", b"LAPTOP"))
    result = invoke("bundle", "verify", bundle, "--trust", trust, "--json")
    assert result.exit_code == 1, result.output
    last = json.loads(result.output)[-1]
    assert (last["name"], last["passed"]) == ("signature", False)
    assert says in last["detail"] or harm in ("stranger", "damaged list")


# -- diff


def test_diff_says_what_changed_and_its_status_is_that_of_compare(
    files: Files, tmp_path: Path
) -> None:
    assert invoke("bundle", "diff", files.first, files.first).exit_code == 0
    changed = packed(
        tmp_path / "changed",
        files.engine,
        pipeline=PIPELINE.replace("width = 32", "width = 32\nresize = 'stretch'"),
        last="dog",
    )
    result = invoke("bundle", "diff", files.first, changed, "--json")
    assert result.exit_code == 1
    difference = json.loads(result.output)
    assert difference["pipeline"] == [
        {"key": "preprocess.resize", "before": None, "after": "stretch"}
    ]
    assert difference["labels"] == [{"key": "9", "before": "class 9", "after": "dog"}]
    assert {row["key"] for row in difference["statements"]} == {
        "metrics.top1", "measured_by.top1", "requires.memory_mb", "licence",
    }  # fmt: skip
    assert difference["engines"] == []
    tensors = [row for row in difference["parts"] if row["dtype"]]
    assert tensors
    assert {row["state"] for row in tensors} == {"equal"}


def test_diff_names_the_tensors_that_changed(files: Files) -> None:
    difference = json.loads(invoke("bundle", "diff", files.first, files.second, "--json").output)
    states = {row["name"]: row["state"] for row in difference["parts"] if row["dtype"] == "F32"}
    assert states == {"tensor w0": "changed", "tensor w1": "changed"}
    shown = invoke("bundle", "diff", files.first, files.second).output
    assert "changed" in shown
    assert "equal" not in shown.partition("parts are equal")[0].split()
    assert invoke("bundle", "diff", files.first, files.second, "--all").output.count("equal") > 1


def test_settings_are_compared_by_their_paths() -> None:
    nested = {"a": {"b": [1, {"c": True}]}, "d": "text"}
    assert flattened(nested) == {"a.b.0": "1", "a.b.1.c": "true", "d": "text"}
    assert changes({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == (
        Change(key="b", before="2", after=None),
        Change(key="c", before=None, after="3"),
    )


@pytest.mark.parametrize("change", ["a tensor", "every tensor a little", "none", "a header"])
def test_the_bytes_of_a_fetch_are_those_that_a_board_takes(change: str, tmp_path: Path) -> None:
    """The board's own download is run beside it, from a slot with the first bundle."""
    chance = np.random.default_rng(3)
    tensors = detector(chance)
    base = write_model_bundle(tmp_path / "base.bundle", tensors)
    after = dict(tensors)
    if change == "a tensor":
        after["block2.weight"] = after["block2.weight"] + np.float32(0.01)
    elif change == "every tensor a little":
        after = {
            name: value + chance.normal(0, 1e-5, value.shape).astype(np.float32)
            for name, value in tensors.items()
        }
    text = "other" if change == "a header" else ""
    bundle = write_model_bundle(tmp_path / "new.bundle", after, metadata=text)
    counted = fetch_bytes(base, bundle)
    taken = board_takes(base, bundle, tmp_path / "board", differences=False)
    assert (counted.reused_bytes, counted.reuse_bytes) == taken
    _, with_differences = board_takes(base, bundle, tmp_path / "delta", differences=True)
    assert counted.delta_bytes == with_differences
    assert counted.delta_bytes <= counted.reuse_bytes <= counted.whole_bytes


def board_takes(base: Path, bundle: Path, folder: Path, *, differences: bool) -> tuple[int, int]:
    """Fetch a bundle as a board does with `base` in its slot: bytes copied, and bytes sent."""
    folder.mkdir()
    extract_bundle(base, folder / "slot")
    blob, base_blob = Blob(bundle), Blob(base)
    (folder / "download").mkdir()
    fetch = Fetch(folder / "download", blob.spec, 8, {base_blob.spec.sha256: folder / "slot"})
    fetch.on_part("index", blob.index, 0.0)
    encoder, sent = DeltaEncoder(blob.file, base_blob.file), len(blob.index)
    for number in fetch.download.missing:
        payload = blob.read(number)
        delta = None
        if differences:
            delta = encoder.encode(blob.table.starts[number], blob.table.size(number))
        fetch.on_part(f"{'' if delta is None else 'd'}{number}", delta or payload, 0.0)
        sent += len(delta or payload)
    assert fetch.download.complete
    fetch.file.finish()
    copied = fetch.copied_bytes
    fetch.close()
    blob.close()
    base_blob.close()
    return copied, sent
