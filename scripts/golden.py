"""Write the plan texts that the tests compare with: `python scripts/golden.py`.

The only way to refresh `tests/golden`: run it, read the difference, and commit both together.
"""

from dataclasses import dataclass
from pathlib import Path

import onnx

from device.manifest import Precision
from device.profile import load_profile
from toolkit.importer import import_model
from toolkit.passes import run_passes
from toolkit.planning.plan import Plan, make_plan
from toolkit.planning.plan_text import render_plan

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
LIGHT_MODELS = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@dataclass(frozen=True)
class Golden:
    """A plan kept as text: a light model of the onnx wheel on a profile."""

    model: str
    profile: str
    precision: Precision
    tensorrt: str

    @property
    def path(self) -> Path:
        """Where the text is kept."""
        return FOLDER / f"plan_{self.model}_{self.profile}_{self.precision}.txt"

    def plan(self) -> Plan:
        """Import the model, run the passes and plan it, every tensor having a scale."""
        model, _ = run_passes(import_model(LIGHT_MODELS / f"light_{self.model}.onnx").model)
        return make_plan(
            model,
            load_profile(self.profile),
            precision=self.precision,
            tensorrt=self.tensorrt,
            has_scale=lambda name: True,
        )


GOLDENS = (
    Golden("resnet50", "agx-orin-64gb", "int8", "10.3"),
    Golden("squeezenet", "agx-orin-64gb", "int8", "10.3"),
    Golden("densenet121", "agx-orin-64gb", "int8", "10.3"),
    Golden("shufflenet", "orin-nx-16gb", "int8", "10.3"),
    Golden("bvlc_alexnet", "orin-nx-8gb", "int8", "8.6.2"),
    Golden("resnet50", "agx-orin-64gb", "fp16", "10.3"),
    Golden("inception_v1", "agx-xavier-32gb", "fp16", "8.5.2"),
    Golden("squeezenet", "orin-nano-8gb", "int8", "10.3"),
)


def main() -> None:
    """Write every text."""
    FOLDER.mkdir(exist_ok=True)
    for golden in GOLDENS:
        golden.path.write_text(render_plan(golden.plan()))
        print(golden.path.name)


if __name__ == "__main__":
    main()
