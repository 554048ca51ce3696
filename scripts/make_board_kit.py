"""Make a board kit: `python -m scripts.make_board_kit --profile orin-nx-16gb --out kit`.

The folder goes to the board: `bash kit/board_kit.sh --out report.tandem-report` there makes an
environment and runs everything that only hardware can prove. docs/board_kit.md says what.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from device import numpy_bound
from device.engine.manifest import Precision
from device.errors import TandemError
from device.selftest.kit import RuleCase
from device.selftest.report import Side
from scripts.case_models import case_model
from scripts.dla_cases import CASES
from scripts.networks import NETWORKS
from scripts.reference_models import REFERENCES
from toolkit.board_kit.make import (
    KitRequest,
    NetworkModel,
    ReferenceModel,
    RuleModel,
    make_kit,
)
from toolkit.board_kit.own_model import model_bytes, own_model, tile_weights
from toolkit.dla.rules.verdicts import RULES, judge, situation_of
from toolkit.engine.target import Target, choose_target
from toolkit.graph.node_view import NodeView, views

TWELVE = (
    "resnet18", "resnet50", "googlenet", "squeezenet", "mobilenet_v1", "mobilenet_v2",
    "mobilenet_v3", "efficientnet_lite0", "shufflenet_v2", "densenet121", "yolov8n", "unet",
)  # fmt: skip
# Those of the twelve whose split is timed: with all of them a kit does not fit into 20 minutes.
SPLITS = ("resnet50", "mobilenet_v2")
OLDEST_PYTHON = (3, 10)
_POLICY = frozenset({"P1"})  # the planner's own rules, which no board can answer


def main() -> int:
    """Make the kit that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--profile", required=True)
    add("--jetpack", help="[default: the best for the profile]")
    add("--out", type=Path, required=True, help="the folder to write")
    names, model_help = sorted(NETWORKS), "also time this ONNX model; its weights stay here"
    add("--network", action="append", choices=names, help="[default: twelve of them]")
    add("--model", type=Path, action="append", default=[], help=model_help)
    kinds, wheels = ["int8", "fp16"], "a wheel for the kit: Tandem's, and what the board lacks"
    add("--precision", action="append", choices=kinds, help="of the networks [default: int8]")
    add("--reference", action="append", choices=sorted(REFERENCES), help="[default: all]")
    add("--wheel", type=Path, action="append", default=[], help=wheels)
    add("--no-demo", action="store_true")
    add("--no-networks", action="store_true")
    add("--json", action="store_true", help="print what the kit holds as JSON")
    arguments = parser.parse_args()
    try:
        target = choose_target(arguments.profile, arguments.jetpack)
        check_agent_runs(target)
        networks = () if arguments.no_networks else arguments.network or TWELVE
        request = KitRequest(
            profile=arguments.profile,
            jetpack=arguments.jetpack,
            references=references(arguments.reference or REFERENCES),
            networks=[*map(network_model, networks), *map(own_model, arguments.model)],
            splits=[*SPLITS, *(arguments.network or ()), *(path.stem for path in arguments.model)],
            rules=rule_models(target),
            precisions=tuple(arguments.precision or ("int8",)),
            demo=not arguments.no_demo,
        )
        kit, left_out = make_kit(arguments.out, request, _progress)
        copy_script(arguments.out, arguments.wheel)
    except TandemError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    counts = {
        "references": len(kit.references),
        "rules": len(kit.rules),
        "networks": len(kit.networks),
        "left_out": left_out,
        "bytes": sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file()),
    }
    if arguments.json:
        print(json.dumps(counts, indent=2))
        return 0
    print(
        f"{arguments.out}: {counts['references']} reference engines, {counts['rules']} cases of "
        f"DLA rules, {counts['networks']} networks, {counts['bytes'] / 1e6:.1f} MB"
    )
    for line in left_out:
        print(f"left out: {line}")
    return 0


def check_agent_runs(target: Target) -> None:
    """Raise TandemError unless the JetPack of the target has a Python that runs the agent."""
    jetpack = target.jetpack
    if jetpack is None or tuple(map(int, jetpack.python.split(".")[:2])) >= OLDEST_PYTHON:
        return
    raise TandemError(
        f"{target.profile.name} with JetPack {jetpack.version} has Python {jetpack.python}, the "
        f"selftest needs {'.'.join(map(str, OLDEST_PYTHON))}: plan and export for it instead "
        f"(tandem plan --jetpack {jetpack.version}, tandem export --to trtexec)"
    )


def _progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def references(names: Sequence[str]) -> list[ReferenceModel]:
    """Return the reference models of these names."""
    return [REFERENCES[name] for name in names]


def network_model(name: str) -> NetworkModel:
    """Return a network of `scripts.networks`."""
    return _tiled(name, NETWORKS[name].model())


def _tiled(name: str, model: ir.Model) -> NetworkModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        ir.save(model, path)  # as `python -m scripts.networks` writes it
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    tile_weights(model)
    return NetworkModel(name, model_bytes(name, model), sha256)


def rule_models(target: Target) -> list[RuleModel]:
    """Return the cases of the rules that hold for a target's DLA and TensorRT."""
    models: list[RuleModel] = []
    for number, case in enumerate(CASES):
        _, precision, _ = case.passes_on or (case.dla, case.precision, None)
        sides: tuple[tuple[Side, NodeView, Precision], ...] = (
            ("at", case.passes, precision), ("beyond", case.fails, case.precision)
        )  # fmt: skip
        for side, view, used in sides:
            name = f"{number:03}-{case.rule}-{side}"
            row = _rule_model(name, case.rule, (side, view, used), target)
            if row is not None:
                models.append(row)
    return models


def _rule_model(
    name: str, rule: str, of_side: tuple[Side, NodeView, Precision], target: Target
) -> RuleModel | None:
    """Return one side of a case, None where the rule does not hold or no board can be asked."""
    side, view, precision = of_side
    dla = target.profile.dla
    if dla is None or rule in _POLICY or precision == "fp32":
        return None
    situation = situation_of(dla, target.tensorrt, precision)
    row = next(row for row in RULES if row.id == rule)
    if row.why_inactive(situation):
        return None
    model, half = case_model(view, half=False), case_model(view, half=True)
    if model is None:
        return None
    # What is judged is what goes to the board: shapes that ONNX infers, values that it keeps.
    node = next(v for v in views(ir.from_proto(model).graph) if v.name == "node")
    broken = {v.rule for v in judge(node, dla, target.tensorrt, precision)} - _POLICY
    if (rule in broken) != (side == "beyond"):
        return None
    case = RuleCase(
        name=name, rule=rule, side=side, op=view.op, precision=precision,
        certainty=row.certainty, half=half is not None, expected=not broken,
    )  # fmt: skip
    data = None if half is None else half.SerializeToString()
    return RuleModel(case, model.SerializeToString(), data)


def copy_script(folder: Path, wheels: Sequence[Path]) -> None:
    """Put the scripts for the board, and wheels, into the kit."""
    try:
        shutil.copy(Path(__file__).with_name("board_kit.sh"), folder)
        shutil.copy(numpy_bound.__file__, folder)
        if wheels:
            (folder / "wheels").mkdir(exist_ok=True)
        for wheel in wheels:
            shutil.copy(wheel, folder / "wheels")
    except OSError as error:
        raise TandemError(
            f"{error.filename} cannot be copied into the kit: {error.strerror}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
