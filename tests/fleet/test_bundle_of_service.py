"""A service as one release: packed, checked, unpacked, compared, and refused where it is odd."""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from cli_fixtures import invoke
from service_fixtures import service_bundle, service_folder

from device.errors import BundleError
from device.update import members
from device.update.bundle import (
    BundleInfo,
    check_bundle,
    extract_bundle,
    hash_folder,
    verify_folder,
    write_bundle_of_service,
)
from device.update.bundle_info import SERVICE
from device.update.byte_source import FileBytes
from device.update.cuts import cut_bundle
from device.update.layout import read_layout
from device.update.state_folder import put_right
from toolkit.fleet.bundles.payload import pack_service

PROGRAM = "payload/bin/llama-server"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service_bundle(tmp_path_factory.mktemp("vlm"), 8080)


def test_the_command_packs_it_and_the_same_files_give_the_same_bytes(
    tmp_path: Path, bundle: Path
) -> None:
    folder = service_folder(tmp_path / "vlm", 8080)
    words = ("--payload", folder / "payload", "--profile", "laptop", "--json")
    pipeline = ("--pipeline", folder / "pipeline.toml", "-o", tmp_path / "a.bundle")
    result = invoke("bundle", "create", *pipeline, *words, "--version", "1")
    assert result.exit_code == 0, result.output
    info = json.loads(result.output)
    assert [row["name"] for row in info["files"]] == [
        "pipeline.toml", PROGRAM, "payload/model.gguf", "sbom.cdx.json",
    ]  # fmt: skip
    assert info["executables"] == [PROGRAM]
    assert info["format"] == SERVICE
    assert (tmp_path / "a.bundle").read_bytes() == bundle.read_bytes()
    for command in ("inspect", "verify", "sbom"):
        shown = invoke("bundle", command, bundle)
        assert shown.exit_code == 0, shown.output
        assert PROGRAM in shown.output.replace("\n", "") or command == "verify"
    assert "runs bin/llama-server 8080 good" in invoke("bundle", "inspect", bundle).output
    newer = service_bundle(tmp_path / "newer", 8081)
    compared = invoke("bundle", "diff", bundle, newer)
    assert compared.exit_code == 1, compared.output
    assert "8081" in compared.output


def test_it_unpacks_with_its_folders_and_programs(tmp_path: Path, bundle: Path) -> None:
    folder = tmp_path / "out"
    info = extract_bundle(bundle, folder)
    assert info.runs == ()
    assert verify_folder(folder) == info == check_bundle(bundle)[0]
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in (PROGRAM, "pipeline.toml")}
    assert modes == {PROGRAM: 0o700, "pipeline.toml": 0o600}
    assert hash_folder(folder)[2] == bundle.stat().st_size
    source = FileBytes(bundle)
    try:
        assert "payload/model.gguf" in {part.key for part in read_layout(source)}
        assert cut_bundle(source)[0].count >= 1
    finally:
        source.close()
    (folder / "payload" / "model.gguf").write_bytes(b"another")
    with pytest.raises(BundleError, match=r"payload/model\.gguf is not the file"):
        verify_folder(folder)


def test_programs_stay_programs_when_the_agent_sets_the_rights_of_its_folder(
    tmp_path: Path, bundle: Path
) -> None:
    slot = tmp_path / "state" / "slots" / "a"
    extract_bundle(bundle, slot)
    (slot / PROGRAM).chmod(0o755)
    (slot / "payload" / "model.gguf").chmod(0o644)
    (slot / "pipeline.toml").chmod(0o755)
    put_right(tmp_path / "state")
    names = (PROGRAM, "payload/model.gguf", "pipeline.toml")
    assert [(slot / name).stat().st_mode & 0o777 for name in names] == [0o700, 0o600, 0o600]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("payload/../x",), "no part of it may begin with a dot"),
        (("payload//x",), "no part of it"),
        (("payload/.x",), "no part of it"),
        (("payload/a b",), "no part of it"),
        (("payload/" + "x" * 100,), "100 characters at most"),
        (("other/x",), "no part of it"),
        (("payload/b", "payload/a"), "in order"),
        ((), "has 0 files in its payload"),
        (tuple(f"payload/{n:04}" for n in range(201)), "has 201 files in its payload"),
    ],
)
def test_a_payload_whose_names_could_leave_its_folder_is_refused(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    folder = service_folder(tmp_path / "vlm", 8080)
    model = folder / "payload" / "model.gguf"
    with pytest.raises(BundleError, match=message):
        write_bundle_of_service(
            tmp_path / "b", payload=dict.fromkeys(names, model), executables=(),
            pipeline=folder / "pipeline.toml", name="vlm", version="1", profile="laptop",
        )  # fmt: skip
    assert not (tmp_path / "b").exists()


def test_a_hostile_bundle_names_no_program_that_it_does_not_hold(
    tmp_path: Path, bundle: Path
) -> None:
    info = msgspec.structs.replace(check_bundle(bundle)[0], executables=("pipeline.toml",))
    folder = tmp_path / "out"
    extract_bundle(bundle, folder)
    (folder / "bundle.json").write_bytes(msgspec.json.encode(info))
    with pytest.raises(BundleError, match=r"'pipeline\.toml' as a program"):
        verify_folder(folder)
    two = msgspec.structs.replace(info, format=5)
    (folder / "bundle.json").write_bytes(msgspec.json.encode(two))
    with pytest.raises(BundleError, match="bundle format 5"):
        verify_folder(folder)
    assert isinstance(info, BundleInfo)


def test_what_cannot_be_packed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = service_folder(tmp_path / "vlm", 8080)
    payload, pipeline = folder / "payload", folder / "pipeline.toml"

    def pack(profile: str = "laptop") -> BundleInfo:
        return pack_service(
            tmp_path / "b", pipeline=pipeline, payload=payload, profile=profile, name=None,
            version="1",
        )  # fmt: skip

    (payload / "libllama.so").symlink_to("model.gguf")
    assert pack().files[-2].name == "payload/model.gguf"
    (payload / "bin" / "llama-server").chmod(0o644)
    with pytest.raises(BundleError, match="'bin/llama-server', which is no executable file"):
        pack()
    (payload / "bin" / "llama-server").chmod(0o755)
    monkeypatch.setattr("toolkit.fleet.bundles.payload.MAX_BUNDLE_BYTES", 100)
    with pytest.raises(BundleError, match="a device fetches 100 at most"):
        pack()
    monkeypatch.undo()
    os.mkfifo(payload / "pipe")
    with pytest.raises(BundleError, match="pipe is no file"):
        pack()
    (payload / "pipe").unlink()
    (payload / "folder").symlink_to("bin")
    with pytest.raises(BundleError, match="folder is no file"):
        pack()
    shutil.rmtree(payload / "bin")
    (payload / "folder").unlink()
    with pytest.raises(BundleError, match="'bin/llama-server', which is not there"):
        pack()
    assert members.PAYLOAD == "payload"


def test_options_of_engines_and_of_services_do_not_mix(tmp_path: Path) -> None:
    folder = service_folder(tmp_path / "vlm", 8080)
    out = ("-o", tmp_path / "b", "--pipeline", folder / "pipeline.toml")
    payload = ("--payload", folder / "payload", "--profile", "laptop")
    for words, message in (
        ((), "give --payload DIR and --profile NAME"),
        (("--payload", folder / "payload"), "give --payload DIR and --profile NAME"),
        ((*payload, "--portable"), "A service has no engines"),
    ):
        result = invoke("bundle", "create", *out, *words)
        assert result.exit_code == 2
        assert message in result.output
