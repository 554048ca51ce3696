"""Make a kit: engines and cases -> `kit.json` and `kit.zip` (device/selftest/kit.py)."""

import hashlib
import re
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

import configs
from device.board_files import tandem_version
from device.engine.file import open_engine, write_engine
from device.engine.manifest import Portable, Precision
from device.engine.purposes import entries_read
from device.engine.tensorrt_manifest import TensorRT
from device.errors import TandemError
from device.profile import load_profile
from device.runtime.cuda.tactics import choices_of, kernels_of
from device.runtime.session import open_session
from device.selftest.demo import BUNDLE, EVENTS, FOLDER
from device.selftest.engines import INPUT, OUTPUT, npz
from device.selftest.kit import (
    DATA,
    LIST,
    Kit,
    NetworkCase,
    Reference,
    RuleCase,
    TacticCase,
)
from device.selftest.report import Variant
from device.update.bundle import ENGINE, LABELS, PIPELINE
from pipelines.vision import cv2
from toolkit.demo.scene_video import SEED
from toolkit.demo.scenes import load_backgrounds, moving_scene
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.importers.onnx import ModelBytes
from toolkit.partition.planning.forced import ALL, Forced
from toolkit.partition.planning.plan import PlanOptions
from toolkit.shipped import demo_file

NAME = "robot-objects"
MODEL = f"models/{NAME}.onnx"
_PICTURES = "pictures"
_PICTURE_COUNT = 30

Array = np.ndarray[Any, Any]
Report = Callable[[str], None]
"""Gets what is made now."""

LIMITS: Mapping[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2, "int8": 5e-2}
"""The largest relative error of a reference engine's output: its kernels add in another order than
the reference on the CPU, and in INT8 a sum that lies between two steps may be rounded to either."""

CERTAINTIES = ("recalled", "observed", "documented")  # the least certain rules are asked first

_SAMPLES = 4
_DATE = (1980, 1, 1, 0, 0, 0)  # of every entry: the same kit gives the same bytes


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A small model with real weights, to be built in `precisions` for the GPU or the DLA."""

    name: str
    model: ModelBytes
    inputs: Mapping[str, tuple[int, ...]]
    precisions: tuple[Precision, ...]
    on: Literal["gpu", "dla"] = "gpu"


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """A network to time; `sha256` is that of its file with its own weights."""

    name: str
    model: ModelBytes
    sha256: str


@dataclass(frozen=True, slots=True)
class RuleModel:
    """A case of a DLA rule, in float32 and, where there is one, in float16."""

    case: RuleCase
    model: bytes
    half: bytes | None


@dataclass(frozen=True, slots=True)
class KitRequest:
    """What a kit is to hold. `precisions`: of the networks; `demo`: with the demo pipeline.

    `splits`: names of networks that are timed on GPU and DLA together, too; None: of all.
    `choices_a_part`: for a farm, the tactics of networks on the GPU in parts of so many operations;
    0: `kernels` and `networks` time them. `tactics`, `shapes`: of the networks, as in a build.
    """

    profile: str
    jetpack: str | None = None
    references: Sequence[ReferenceModel] = ()
    networks: Sequence[NetworkModel] = ()
    rules: Sequence[RuleModel] = ()
    splits: Collection[str] | None = None
    precisions: tuple[Precision, ...] = ("int8",)
    demo: bool = True
    choices_a_part: int = 0
    tactics: TacticOptions = field(default_factory=TacticOptions)
    shapes: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where a kit is made: the open zip file, a folder for engines, and the request."""

    archive: zipfile.ZipFile
    folder: Path
    request: KitRequest
    has_dla: bool
    report: Report
    parts: list[TacticCase] = field(default_factory=list)


def make_kit(folder: Path, request: KitRequest, report: Report) -> tuple[Kit, tuple[str, ...]]:
    """Write a kit into a folder; return its list, and what was left out with the reason.

    Raises TandemError: a model or the profile cannot be used, or the folder cannot be written.
    """
    profile = load_profile(request.profile)
    rules = in_order(request.rules) if profile.dla_cores else ()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory() as name,
            zipfile.ZipFile(folder / DATA, "w") as archive,
        ):
            bench = _Bench(archive, Path(name), request, profile.dla_cores > 0, report)
            references = _references(bench)
            networks, left_out = _networks(bench)
            _add_rules(archive, rules)
            if request.demo:
                _demo(bench)
        kit = Kit(
            tandem=tandem_version(),
            profile=profile.name,
            sha256=hashlib.sha256((folder / DATA).read_bytes()).hexdigest(),
            references=references,
            rules=tuple(rule.case for rule in rules),
            networks=networks,
            tactics=tuple(bench.parts),
            demo=request.demo,
        )
        (folder / LIST).write_bytes(msgspec.json.format(msgspec.json.encode(kit), indent=1))
    except OSError as error:
        raise BuildError(
            f"{folder} cannot take the kit: {error.strerror}; write it elsewhere"
        ) from error
    return kit, left_out


def _references(bench: _Bench) -> tuple[Reference, ...]:
    return tuple(
        _reference(bench, model, precision)
        for model in bench.request.references
        if model.on == "gpu" or bench.has_dla
        for precision in model.precisions
    )


def _networks(bench: _Bench) -> tuple[tuple[NetworkCase, ...], tuple[str, ...]]:
    """Build all networks; second, those that are left out with the reason.

    A selftest that ends early has whole networks on the DLA and on the GPU, which the fit of costs
    and measured plans take; splits are for the check of a plan, and come last.
    """
    splits = bench.request.splits
    rounds: tuple[tuple[Variant, ...], ...] = (("dla", "gpu"), ("split",))
    rows = [
        _network(bench, network, precision, variant)
        for precision in bench.request.precisions
        for variants in (rounds if bench.has_dla else (("gpu",),))
        for network in bench.request.networks
        for variant in variants
        if variant != "split" or splits is None or network.name in splits
    ]
    return (
        tuple(row for row in rows if isinstance(row, NetworkCase)),
        tuple(row for row in rows if isinstance(row, str)),
    )


def in_order(rules: Sequence[RuleModel]) -> tuple[RuleModel, ...]:
    """Return the cases in the order in which a board is asked, which may end anywhere.

    The first case of each rule comes before the second of any, of the least certain rules first;
    both sides of a case follow each other.
    """
    cases: dict[str, dict[str, None]] = {}  # of each rule: the names without a side, in order
    keys: dict[str, tuple[int, int]] = {}
    for rule in rules:
        case = rule.case
        stem = case.name.removesuffix(f"-{case.side}")
        stems = cases.setdefault(case.rule, {})
        stems[stem] = None
        keys[case.name] = list(stems).index(stem), CERTAINTIES.index(case.certainty)
    return tuple(sorted(rules, key=lambda rule: keys[rule.case.name]))


def _add_rules(archive: zipfile.ZipFile, rules: Sequence[RuleModel]) -> None:
    for rule in rules:
        _add(archive, f"cases/{rule.case.name}.onnx", rule.model)
        if rule.half is not None:
            _add(archive, f"cases/{rule.case.name}.half.onnx", rule.half)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def _reference(bench: _Bench, model: ReferenceModel, precision: Precision) -> Reference:
    """Build a reference engine; its known outputs are those of its portable form on this CPU."""
    name = f"{model.name}-{precision}"
    bench.report(f"reference {name}")
    random = np.random.default_rng(len(name))
    samples: list[Mapping[str, Array]] = [
        {n: random.normal(size=shape).astype(np.float32) for n, shape in model.inputs.items()}
        for _ in range(_SAMPLES)
    ]
    path = bench.folder / f"{name}.engine"
    options = BuildOptions(
        precision=precision,
        jetpack=bench.request.jetpack,
        data=samples if precision == "int8" else None,
        accept_loss=True,
        fallback=False,  # the DLA is what is asked
        plan=PlanOptions(forced=_forced(bench, model.on)),
    )
    build_engine(model.model, bench.request.profile, path, options)
    outputs = _portable_outputs(path, samples[0])
    arrays = {f"{INPUT}{key}": value for key, value in samples[0].items()}
    arrays |= {f"{OUTPUT}{key}": value for key, value in outputs.items()}
    _add(bench.archive, f"golden/{name}.npz", npz(arrays))
    _add_engine(bench.archive, name, path, keep_portable=model.on == "dla")
    return Reference(name=name, precision=precision, on=model.on, limit=LIMITS[precision])


def _forced(bench: _Bench, variant: Variant) -> Forced:
    """Return what puts all that can be there onto one processor; a split is the planner's."""
    if not bench.has_dla or variant == "split":
        return Forced()
    return Forced(gpu=(ALL,)) if variant == "gpu" else Forced(dla=(ALL,))


def _portable_outputs(path: Path, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
    """Run an engine with its portable implementations alone, whatever this machine has."""
    portable = path.with_suffix(".portable")
    with open_engine(path) as engine:
        segments = tuple(
            msgspec.structs.replace(
                segment,
                implementations=tuple(
                    i for i in segment.implementations if isinstance(i, Portable)
                ),
            )
            for segment in engine.manifest.segments
        )
        manifest = msgspec.structs.replace(engine.manifest, segments=segments)
        write_engine(portable, manifest, {n: engine.entry(n) for n in entries_read(manifest)})
    with open_session(portable) as session:
        return session.infer(feeds)


def _add_engine(
    archive: zipfile.ZipFile, name: str, path: Path, *, keep_portable: bool = False
) -> None:
    """Add an engine without what a board of the profile has no use for."""
    with open_engine(path) as engine:
        segments = tuple(
            segment if keep_portable else msgspec.structs.replace(
                segment,
                implementations=tuple(
                    i for i in segment.implementations if not isinstance(i, Portable)
                ) or segment.implementations,
            )
            for segment in engine.manifest.segments
        )  # fmt: skip
        manifest = msgspec.structs.replace(engine.manifest, segments=segments)
        slim = path.with_suffix(".slim")
        write_engine(slim, manifest, {n: engine.entry(n) for n in entries_read(manifest)})
    _add(archive, f"engines/{name}.engine", slim.read_bytes())
    slim.unlink()


def _network(
    bench: _Bench, network: NetworkModel, precision: Precision, variant: Variant
) -> NetworkCase | str:
    """Build a network on one placement; a text says why it is not in the kit."""
    name = f"{network.name}-{precision}-{variant}"
    bench.report(f"network {name}")
    options = BuildOptions(
        precision=precision,
        jetpack=bench.request.jetpack,
        dummy_ranges=precision == "int8",
        accept_loss=True,
        fallback=False,
        plan=PlanOptions(forced=_forced(bench, variant)),
        tactics=bench.request.tactics,
        shapes=bench.request.shapes,
    )
    path = bench.folder / f"{name}.engine"
    try:
        built = build_engine(network.model, bench.request.profile, path, options)
    except TandemError as error:
        return f"{name}: {error}"
    on_dla = any(
        isinstance(i, TensorRT) for s in built.manifest.segments for i in s.implementations
    )
    if variant != "gpu" and not on_dla:
        path.unlink()
        return f"{name}: the plan puts nothing on the DLA"
    _add_engine(bench.archive, name, path)
    if bench.request.choices_a_part and variant == "gpu":
        bench.parts.extend(_parts(path, name, bench.request.choices_a_part))
    path.unlink()
    return NetworkCase(
        name=name,
        network=network.name,
        variant=variant,
        precision=precision,
        model_sha256=network.sha256,
    )


def _parts(path: Path, name: str, choices: int) -> Iterator[TacticCase]:
    """Yield the parts of an engine's tactics, those that have any."""
    with open_engine(path) as engine:
        most = max((len(choices_of(engine, cuda)) for cuda in kernels_of(engine)), default=0)
    parts = -(-most // choices)
    for part in range(parts):
        yield TacticCase(name=f"{name}.{part}", engine=name, part=part, parts=parts)


def _demo(bench: _Bench) -> None:
    bench.report("demo")
    path = bench.folder / "demo.engine"
    precision: Precision = "fp16" if load_profile(bench.request.profile).sm else "fp32"
    options = BuildOptions(precision=precision, jetpack=bench.request.jetpack)
    build_engine(configs.ROOT / MODEL, bench.request.profile, path, options)
    for name, data in demo_files(path):
        _add(bench.archive, name, data)


def demo_files(engine: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the entries of the demo: the shipped detector with its pipeline, and pictures."""
    yield f"{BUNDLE}/{ENGINE}", engine.read_bytes()
    yield f"{BUNDLE}/{LABELS}", (configs.ROOT / f"models/{NAME}.labels.txt").read_bytes()
    pipeline = (configs.ROOT / f"pipelines/{NAME}.toml").read_text()
    yield f"{BUNDLE}/{PIPELINE}", pipeline_text(pipeline).encode()
    backgrounds = load_backgrounds(demo_file("scenes/backgrounds"), held_out=True)
    for number, scene in enumerate(moving_scene(SEED, _PICTURE_COUNT, backgrounds)):
        _, encoded = cv2.imencode(".jpg", scene.image)
        yield f"{FOLDER}/{_PICTURES}/{number:03}.jpg", encoded.tobytes()


def pipeline_text(shipped: str) -> str:
    """Return the shipped pipeline, from the pictures to a file."""
    sections = re.split(r"(?m)^(?=\[)", shipped)
    shared = [s for s in sections if not s.startswith(("[source]", "[[sinks]]"))]
    return (
        "".join(shared) + f'\n[source]\nuri = "{_PICTURES}"\nframes = "every"\nrealtime = false\n'
        f'\n[[sinks]]\nkind = "jsonl"\npath = "{EVENTS}"\n'
    )
