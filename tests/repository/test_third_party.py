"""THIRD_PARTY.md lists every dependency with the licence that its installed package declares."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from foreign_models import wheels
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "THIRD_PARTY.md").read_text()
LICENCES = dict(re.findall(r"^\| ([\w-]+) \| (.+?) \| (?:everywhere|Python|`)", TEXT, re.M))
EXTRAS = (
    "otel",
    "serve",
    "web",
    "camera",
    "dask",
    "portable",
    "fleet",
    "postgresql",
    "host",
    "openvino",
    "serial",
    "ros2",
    "dds",
    "mcap",
    "foxglove",
    "torch",
    "tensorflow",
    "gpu-build",
    "cuda",
)
# What packages write in place of an SPDX expression.
SPDX = {
    "Apache 2.0": "Apache-2.0",
    "EPL-2.0, BSD-3-Clause": "EPL-2.0 OR BSD-3-Clause",  # cyclonedds: its sources say OR
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",  # pyserial: its LICENSE.txt has three clauses
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: MIT License": "MIT",
}


def dependencies() -> set[str]:
    names = set()
    for text in metadata.requires("tandem-edge") or ():
        requirement = Requirement(text)
        marker = str(requirement.marker or "")
        of_extra = re.search(r'extra == "([\w-]+)"', marker)
        if of_extra is None or of_extra[1] in EXTRAS:
            names.add(requirement.name)
    return names - {"tandem-edge"}


def declared(name: str) -> set[str]:
    """What a package's metadata says of its licence, as SPDX where it is known."""
    about = metadata.metadata(name)
    texts = [about.get("License-Expression"), about.get("License")]
    texts += about.get_all("Classifier") or ()
    return {SPDX.get(text, text) for text in texts if text}


def test_every_dependency_is_listed() -> None:
    assert set(LICENCES) == dependencies()


@pytest.mark.parametrize("name", LICENCES)
def test_a_licence_is_the_one_that_the_package_declares(name: str) -> None:
    try:
        assert LICENCES[name] in declared(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")


def test_shipped_data_is_listed() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("configs/**/*.jpg")}
    assert all(f"`{folder}/`" in TEXT for folder in folders)
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "data").iterdir()}
    assert all(f"`{path}`" in TEXT for path in data)


def test_the_wheels_of_the_tests_models_are_listed() -> None:
    section = TEXT.split("## Models of the tests")[1]
    listed = re.findall(r"^\| ([a-z][\w, -]+?)(?: \(.*\))? \|", section, re.M)
    names = {name for row in listed for name in row.split(", ")} - {"wheel"}
    assert names == {distribution for distribution, _ in wheels()}
