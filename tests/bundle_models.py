"""Bundles with a model inside: tensors as a network has them, by the safetensors library."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from device.update.bundle import ModelSource, write_bundle, write_bundle_of_models

Tensors = Mapping[str, npt.NDArray[np.generic]]


def detector(
    chance: np.random.Generator, blocks: int = 6, width: int = 48
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors of a detector: convolutions with their small parameters, and a head."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for block in range(blocks):
        name, channels = f"block{block}", width * (1 + block % 3)
        shape = (channels, channels, 3, 3)
        tensors[f"{name}.weight"] = chance.normal(0.0, 0.05, shape).astype(np.float32)
        for small in ("bias", "scale", "zero"):
            tensors[f"{name}.{small}"] = chance.normal(size=channels).astype(np.float32)
    tensors["head.weight"] = chance.normal(0.0, 0.05, (18, width)).astype(np.float32)
    return tensors


def write_model_bundle(
    path: Path, tensors: Tensors, *, version: str = "1", metadata: str = "", profile: str = "laptop"
) -> Path:
    """Write a bundle with these tensors in its engine and a text in the engine's header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    engine, text = path.with_suffix(".e"), path.with_suffix(".t")
    save_file(dict(tensors), engine, {"manifest": metadata or "m"})
    text.write_text("good\n")
    write_bundle(
        path,
        engine=engine,
        pipeline=text,
        labels=text,
        name="model",
        version=version,
        profile=profile,
    )
    return path


def write_bundle_of_several(
    path: Path, engines: Mapping[str, Tensors], *, version: str = "1", profile: str = "laptop"
) -> Path:
    """Write a bundle of models, by name, with these tensors in their engines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_suffix(".t")
    text.write_text("good\n")
    sources = []
    for name, tensors in engines.items():
        engine = path.with_name(f"{path.stem}-{name}.e")
        save_file(dict(tensors), engine, {"manifest": name})
        sources.append(ModelSource(name, engine, text))
    write_bundle_of_models(
        path, models=sources, pipeline=text, name="models", version=version, profile=profile
    )
    return path
