"""Write the plan texts that the tests compare with: `python scripts/golden.py`.

The only way to refresh `tests/golden`: run it, read the difference, and commit both together.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import onnx

from device.engine.manifest import Precision
from toolkit.engine.plan_models import PlanMember, PlanRequest, make_plan
from toolkit.partition.planning.objectives import DEFAULT
from toolkit.partition.planning.plan import Plan, PlanOptions
from toolkit.partition.planning.plan_text import render_plan

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
SECONDS = 120.0  # of search: far more than any proof takes, so that a busy machine finds the same
LIGHT_MODELS = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@dataclass(frozen=True)
class Golden:
    """A plan kept as text: a light model of the onnx wheel on a profile."""

    model: str
    profile: str
    precision: Precision
    jetpack: str
    objective: str = DEFAULT

    @property
    def path(self) -> Path:
        """Where the text is kept."""
        aim = "" if self.objective == DEFAULT else f"_{self.objective}"
        return FOLDER / f"plan_{self.model}_{self.profile}_{self.precision}{aim}.txt"

    def plan(self) -> Plan:
        """Plan the model as `tandem plan` does, every tensor having a scale."""
        member = PlanMember(self.model, LIGHT_MODELS / f"light_{self.model}.onnx")
        options = PlanOptions(self.precision, objective=self.objective, seconds=SECONDS)
        request = PlanRequest((member,), self.profile, self.jetpack, options)
        (plan,) = make_plan(request).shared.plans
        return plan


MODELS = (
    *("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50"),
    *("shufflenet", "squeezenet", "vgg19", "zfnet512"),
)
BOARDS: tuple[tuple[str, Precision, str], ...] = (
    ("agx-orin-64gb", "int8", "6.2"),
    ("orin-nx-8gb", "int8", "6.0"),
    ("agx-xavier-32gb", "fp16", "5.1.3"),
)
GOLDENS = (
    *(Golden(model, *board) for model in MODELS for board in BOARDS),
    Golden("squeezenet", "orin-nano-8gb", "int8", "6.2"),
    Golden("resnet50", "agx-orin-64gb", "int8", "6.2", "latency"),
    Golden("resnet50", "agx-orin-64gb", "int8", "6.2", "energy"),
    Golden("resnet50", "agx-orin-64gb", "int8", "6.2", "gpu-relief"),
)


def main() -> None:
    """Write every text."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for old in set(FOLDER.glob("plan_*.txt")) - {golden.path for golden in GOLDENS}:
        old.unlink()
    for golden in GOLDENS:
        golden.path.write_text(render_plan(golden.plan()))
        print(golden.path.name)


if __name__ == "__main__":
    main()
