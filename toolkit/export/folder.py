"""The folder of an export: a model for each era of TensorRT, and a script for each release.

implicit/   TensorRT 8.5 to 10.7: plain ONNX, a calibration cache for each release
explicit/   TensorRT from 10.8 on: strongly typed ONNX, with Q/DQ in INT8
export.json what was written, and what was not and why

The releases are those that the JetPacks of the engine's profile bring.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import onnx
import onnx_ir as ir

from calibration.trt_cache import cache_of, cache_version, encode_cache
from device.engine.arithmetic import BFLOAT16_STEP
from device.engine.file import open_engine
from device.profile import Profile
from toolkit.errors import BuildError, first_line
from toolkit.export.half import MIN_OPSET, beyond_scales, to_half
from toolkit.export.joined_network import Network, network_of
from toolkit.export.releases import Era, Release, profile_of, releases_of
from toolkit.export.trtexec import Recipe, nameable, recipe
from toolkit.gpu.beyond_half import beyond_half
from toolkit.quantize.qdq.check import check_qdq
from toolkit.quantize.qdq.export import export_qdq
from toolkit.quantize.quantize import is_activation

MODEL = "model.onnx"
MAX_PROTOBUF_BYTES = 2**31 - 1

NEW_VALUES: Mapping[tuple[str, str], frozenset[str]] = {
    ("Resize", "coordinate_transformation_mode"): frozenset({"half_pixel_symmetric"}),
    ("Resize", "keep_aspect_ratio_policy"): frozenset({"not_larger", "not_smaller"}),
    ("Pad", "mode"): frozenset({"wrap"}),
    ("GridSample", "mode"): frozenset({"linear", "cubic"}),
    ("ScatterElements", "reduction"): frozenset({"max", "min"}),
    ("ScatterND", "reduction"): frozenset({"max", "min"}),
}
"""(operator, attribute) -> values that came, or were renamed, in opsets 18 to 20."""


@dataclass(frozen=True, slots=True)
class EraExport:
    """One era's files. `problem`: why there are none."""

    era: Era
    recipes: tuple[Recipe, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported, and where to."""

    engine: Path
    folder: Path
    profile: str
    eras: tuple[EraExport, ...]


def export_trtexec(engine_path: Path, folder: Path, profile: Profile | None = None) -> Export:
    """Write an engine as a folder for trtexec; the folder appears whole or not at all.

    `profile`: that of the engine, where it is none of Tandem's. Raises BuildError: `folder` exists,
    or the engine fits no release of its profile. EngineError: it is no engine.
    """
    with new_folder(folder) as temporary:
        with open_engine(engine_path) as engine:
            if engine.manifest.uncalibrated:
                raise BuildError(
                    f"{engine_path} holds dummy ranges, good for timing only, and an export cannot "
                    "say so; calibrate the model first."
                )
            if BFLOAT16_STEP in engine.manifest.provenance.passes:
                raise BuildError(
                    f"{engine_path} computes in BF16, of which no files for TensorRT are written, "
                    "and FP16 may not hold its values; export an engine of "
                    "`tandem build --precision fp32`."
                )
            network = _renamed(network_of(engine))
        releases = releases_of(profile or profile_of(network.profile))
        eras = tuple(
            write(network, rows, temporary)
            for era, write in (("implicit", _write_implicit), ("explicit", _write_explicit))
            if (rows := [row for row in releases if row.era == era])
        )
        export = Export(engine_path, folder, network.profile, eras)
        if not any(written(era) for era in eras):
            raise BuildError(f"{engine_path} fits no release of TensorRT: {_reasons(eras)}.")
        (temporary / "export.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(as_builtins(export)), indent=2) + b"\n"
        )
    return export


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that appears whole or not at all. Raises BuildError: it exists."""
    if folder.exists():
        raise BuildError(f"{folder} exists; give --output a folder that does not.")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, folder)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def written(era: EraExport) -> tuple[Recipe, ...]:
    """Return the recipes that have a script."""
    return tuple(row for row in era.recipes if not row.problem)


def as_builtins(export: Export) -> dict[str, object]:
    """Return what `--json` prints and export.json holds."""
    return {
        "engine": export.engine.name,
        "profile": export.profile,
        "eras": [
            {
                "era": era.era,
                "problem": era.problem,
                "notes": list(era.notes),
                "releases": [
                    {
                        "tensorrt": row.release.version,
                        "jetpack": row.release.jetpack,
                        "problem": row.problem,
                        "notes": list(row.notes),
                        "arguments": list(row.arguments),
                    }
                    for row in era.recipes
                ],
            }
            for era in export.eras
        ],
    }


def _renamed(network: Network) -> Network:
    """Return the network with node names that trtexec can be told."""
    before = [str(node.name) for node in network.model.graph]
    model = nameable(network.model)
    names = dict(zip(before, (str(node.name) for node in model.graph), strict=True))
    return replace(
        network,
        model=model,
        float_nodes=tuple(names[name] for name in network.float_nodes),
        processors={names[name]: place for name, place in network.processors.items()},
    )


def _write_implicit(network: Network, releases: Sequence[Release], folder: Path) -> EraExport:
    network = replace(network, model=_oldest(network.model, min(r.max_opset for r in releases)))
    rows = tuple(
        recipe(network, release, dla_core=_core(network), model=MODEL, cache=_cache_name(release))
        for release in releases
    )
    era = EraExport("implicit", rows)
    if written(era):
        place = folder / "implicit"
        place.mkdir()
        write_model(place / MODEL, network.model)
        _write_scripts(place, rows)
        for row in written(era):
            if network.precision == "int8":
                ranges = {**network.amax, **network.results}
                cache = cache_of(ranges, cache_version(row.release.version))
                (place / _cache_name(row.release)).write_text(encode_cache(cache))
    return era


def _write_explicit(network: Network, releases: Sequence[Release], folder: Path) -> EraExport:
    try:
        typed = _typed(network)
    except BuildError as error:
        return EraExport("explicit", problem=str(error).rstrip("."))
    model = replace(network, model=typed)
    rows = tuple(
        recipe(model, release, dla_core=_core(network), model=MODEL, cache="")
        for release in releases
    )
    era = EraExport("explicit", rows)
    if written(era):
        place = folder / "explicit"
        place.mkdir()
        write_model(place / MODEL, typed)
        _write_scripts(place, rows)
    return era


def _typed(network: Network) -> ir.Model:
    """Return the network as strongly typed TensorRT reads it."""
    model = network.model
    if network.precision == "fp32":
        return model
    opset = model.graph.opset_imports.get("", 0)
    if opset < MIN_OPSET:
        model = _converted(model)
    if network.precision == "int8":
        target = "tensorrt-gpu" if _core(network) is None else "tensorrt-dla"
        keep = {
            *network.float_nodes,
            *_unranged_readers(model, network),
            *beyond_scales(model, network.amax),
        }
        model = export_qdq(model, network.amax, target, keep_float=frozenset(keep))
        on_dla = {name for name, place in network.processors.items() if place.startswith("dla")}
        violations = check_qdq(model, target, in_int8=frozenset(on_dla - keep))
        if violations:
            raise BuildError(f"its Q/DQ break a rule of TensorRT: {violations[0]}")
    whole_on_dla = all(place.startswith("dla") for place in network.processors.values())
    return to_half(model, half_io=whole_on_dla, wide=beyond_half(network.model, None))


def _oldest(model: ir.Model, opset: int) -> ir.Model:
    """Return a model with an older opset, where that has all of its operators as they are.

    ONNX's checker refuses an attribute or operand that came later, NEW_VALUES what it does not see.
    """
    if model.graph.opset_imports.get("", 0) <= opset or any(map(_has_new_value, model.graph)):
        return model
    older = model.clone()
    older.graph.opset_imports[""] = opset
    try:
        onnx.checker.check_model(ir.to_proto(older), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return model
    return older


def _has_new_value(node: ir.Node) -> bool:
    return any(
        str(node.attributes[name].value) in values
        for (op, name), values in NEW_VALUES.items()
        if node.op_type == op and name in node.attributes
    )


def _converted(model: ir.Model) -> ir.Model:
    opset = model.graph.opset_imports.get("", 0)
    try:
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), MIN_OPSET))
    except (RuntimeError, ValueError) as error:
        raise BuildError(
            f"the model has opset {opset}, Q/DQ in FP16 need {MIN_OPSET}, and ONNX's converter "
            f"fails ({error}); export the model again with opset {MIN_OPSET}"
        ) from error


def _unranged_readers(model: ir.Model, network: Network) -> Iterable[str]:
    """The nodes that read an activation without a range: it was not in INT8 in the engine."""
    for node in model.graph:
        for value in node.inputs:
            if value is not None and is_activation(value) and str(value.name) not in network.amax:
                yield str(node.name)


def _core(network: Network) -> int | None:
    """Return the DLA core of the plan's first DLA segment, None without one."""
    cores = [place for place in network.processors.values() if place.startswith("dla")]
    return int(cores[0].removeprefix("dla")) if cores else None


def _cache_name(release: Release) -> str:
    return f"calibration-{release.version}.cache"


def write_model(path: Path, model: ir.Model) -> None:
    """Write ONNX. Raises BuildError: it is not valid, or too large for one file."""
    proto = ir.to_proto(model)
    if proto.ByteSize() > MAX_PROTOBUF_BYTES:
        raise BuildError(
            f"The model takes {proto.ByteSize() / 1e9:.1f} GB, and an ONNX file holds at most 2 GB "
            "without files beside it."
        )
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise BuildError(f"The export is not valid ONNX: {first_line(error)}.") from error
    path.write_bytes(proto.SerializeToString(deterministic=True))


def _write_scripts(folder: Path, rows: Iterable[Recipe]) -> None:
    for row in rows:
        if not row.problem:
            path = folder / f"trtexec-{row.release.version}.sh"
            path.write_text(row.script)
            path.chmod(0o755)


def _reasons(eras: Iterable[EraExport]) -> str:
    rows = [f"{era.era}: {era.problem}" for era in eras if era.problem]
    rows += [f"{row.release.version}: {row.problem}" for era in eras for row in era.recipes]
    return "; ".join(rows)
