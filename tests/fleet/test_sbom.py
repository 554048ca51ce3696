"""Bills of materials: valid CycloneDX, the same again, and true of the bundle that they are in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_fixtures import invoke
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from golden_fixtures import PIPELINE
from model_fixtures import small_convnet

from device.update.bundle import BOM, BundleInfo, extract_bundle, read_bundle_info, write_bundle
from toolkit.build import BuildOptions, build_engine
from toolkit.fleet.bundles.facts import check_licence
from toolkit.fleet.bundles.sbom import PACKAGES, bill_of_materials
from toolkit.fleet.bundles.unpacked import unpacked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated engine, a pipeline and labels."""
    folder = tmp_path_factory.mktemp("sbom")
    model = small_convnet(folder / "m.onnx", np.random.default_rng(1))
    chance = np.random.default_rng(2)
    data = [{"x": chance.random((1, 3, 32, 32), np.float32)} for _ in range(4)]
    options = BuildOptions(precision="int8", data=data, accept_loss=True, kernels=False)
    build_engine(model, "laptop", folder / "m.engine", options)
    (folder / "pipeline.toml").write_text(PIPELINE)
    (folder / "labels.txt").write_text("".join(f"class {n}\n" for n in range(10)))
    return folder


def pack(folder: Path, out: Path, *options: str) -> Path:
    files = ("--pipeline", folder / "pipeline.toml", "--labels", folder / "labels.txt")
    result = invoke("bundle", folder / "m.engine", *files, "-o", out, *options)
    assert result.exit_code == 0, result.exception
    return out


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    options = ("--license", "Apache-2.0 OR MIT", "--requires", "memory_mb=500", "--golden", "1")
    return pack(folder, folder / "a.bundle", *options)


def properties(component: dict[str, object]) -> dict[str, str]:
    rows = component.get("properties", [])
    return {row["name"]: row["value"] for row in rows}  # type: ignore[attr-defined]


def test_it_is_valid_and_names_all_that_the_bundle_is_made_of(bundle: Path) -> None:
    text = invoke("bundle", "sbom", bundle).output
    errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert errors is None, errors
    document = json.loads(text)
    info = read_bundle_info(bundle)
    rows = {row["bom-ref"]: row for row in document["components"]}
    hashes = {row["name"]: row["hashes"][0]["content"] for row in rows.values() if "hashes" in row}
    for entry in info.files[:-1]:
        assert hashes[entry.name] == entry.sha256
    with unpacked(bundle) as opened:
        (engine,) = opened.engines.values()
        source = engine.manifest.provenance
    assert source.calibration is not None
    assert hashes["m.onnx"] == source.model_sha256
    assert hashes["calibration data"] == source.calibration.data_sha256
    assert hashes["calibration table"] == source.calibration.table_sha256
    for name in ("onnx", "tandem-edge"):
        package = rows[f"pkg:pypi/{name}@{source.versions[name]}"]
        assert package["licenses"] == [{"license": {"id": PACKAGES[name]}}]
    release = document["metadata"]["component"]
    assert release["licenses"] == [{"expression": "Apache-2.0 OR MIT"}]
    message = properties(release)
    assert message["tandem:requires:memory_mb"] == "500"
    measured = {row.name: row.value for row in source.measured or ()}
    assert measured
    assert {name: float(message[f"tandem:metric:{name}"]) for name in measured} == measured
    assert "INT8 against FP32" in message["tandem:measured-by:sqnr_db"]
    assert rows["board:onnxruntime"]["scope"] == "optional"
    edges = {row["ref"]: set(row.get("dependsOn", ())) for row in document["dependencies"]}
    assert {"file:model.engine", "file:golden.npz"} <= edges["bundle"]
    assert "model of model.engine" in edges["file:model.engine"]
    assert edges.keys() == {*rows, "bundle"}


def test_the_same_bundle_has_the_same_bill_without_a_clock(folder: Path, tmp_path: Path) -> None:
    first = pack(folder, tmp_path / "1.bundle")
    # In a process of its own, with another hash seed and time zone.
    code = "import sys; from toolkit.cli.commands.bundle import bundle; bundle(sys.argv[1:])"
    arguments = [
        str(folder / "m.engine"), "--pipeline", str(folder / "pipeline.toml"), "--labels",
        str(folder / "labels.txt"), "-o", str(tmp_path / "2.bundle"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=True)
    assert (tmp_path / "2.bundle").read_bytes() == first.read_bytes()
    document = json.loads(invoke("bundle", "sbom", first).output)
    assert "timestamp" not in document["metadata"]
    second = json.loads(
        invoke("bundle", "sbom", pack(folder, tmp_path / "3", "--version", "2")).output
    )
    assert second["serialNumber"] != document["serialNumber"]


def test_a_bill_of_another_bundle_is_found(bundle: Path, folder: Path, tmp_path: Path) -> None:
    assert invoke("bundle", "verify", bundle).exit_code == 0
    extract_bundle(bundle, tmp_path / "slot")
    wrong = tmp_path / "wrong.json"
    held = (tmp_path / "slot" / BOM).read_text()
    wrong.write_text(held.replace(read_bundle_info(bundle).files[0].sha256, "0" * 64))
    out = tmp_path / "wrong.bundle"

    def write(_: BundleInfo) -> Path:
        return wrong

    write_bundle(
        out, engine=tmp_path / "slot/model.engine", pipeline=tmp_path / "slot/pipeline.toml",
        labels=tmp_path / "slot/labels.txt", name="m", version="1", profile="laptop", bom=write,
    )  # fmt: skip
    result = invoke("bundle", "verify", out, "--json")
    assert result.exit_code == 1
    (failed,) = (row for row in json.loads(result.output) if not row["passed"])
    assert failed["name"] == BOM
    assert "does not list golden.npz, model.engine as the bundle holds it" in failed["detail"]


def test_a_bundle_of_an_earlier_version_has_none_and_gets_one(bundle: Path, tmp_path: Path) -> None:
    info = extract_bundle(bundle, tmp_path / "slot")
    out = tmp_path / "old.bundle"
    write_bundle(
        out, engine=tmp_path / "slot/model.engine", pipeline=tmp_path / "slot/pipeline.toml",
        labels=tmp_path / "slot/labels.txt", name=info.name, version="1", profile="laptop",
    )  # fmt: skip
    assert BOM not in [entry.name for entry in read_bundle_info(out).files]
    text = invoke("bundle", "sbom", out).output
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert invoke("bundle", "verify", out).exit_code == 0
    with unpacked(out) as opened:
        manifests = {name: engine.manifest for name, engine in opened.engines.items()}
        assert bill_of_materials(opened.info, manifests).decode() == text


@pytest.mark.parametrize("text", ["MIT", "Apache-2.0 OR MIT", "LicenseRef-Ours", "AGPL-3.0-only"])
def test_an_spdx_licence_is_taken(text: str) -> None:
    check_licence(text)


@pytest.mark.parametrize("text", ["mine", "AGPL-3.0 License (https://x)", "MIT OR"])
def test_another_text_is_refused(text: str, folder: Path, tmp_path: Path) -> None:
    files = ("--pipeline", folder / "pipeline.toml", "--labels", folder / "labels.txt")
    result = invoke("bundle", folder / "m.engine", *files, "-o", tmp_path / "x", "--license", text)
    assert result.exit_code == 1
    assert "this is no SPDX licence" in str(result.exception)
    assert not (tmp_path / "x").exists()
