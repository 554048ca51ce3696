"""The judge: which rules of the DLA refuse a node.

The rows are in `dla_general_rules` and `dla_layer_rules`; a node keeps the order of the rows. Rules
on what runs together are in `dla_memory` (loadables, pools) and `dla_formats` (tensors at the
border of a segment). The equal INT8 ranges that the DLA wants around poolings, sums and
concatenations refuse nothing, for a table can always be made to have them (`int8.scale_rules`).
"""

from functools import cache

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.rules.general_rules import GENERAL_RULES
from toolkit.dla.rules.layer_rules import LAYER_RULES
from toolkit.dla.rules.rule import Generation, Rule, Situation, Verdict, parse_version
from toolkit.graph.node_view import NodeView

# The TensorRT of the last JetPack of each generation (5.1 and 6.2), taken where none is named.
USUAL_TENSORRT: dict[Generation, str] = {"v1": "8.5.2", "v2": "10.3.0"}

RULES: tuple[Rule[NodeView], ...] = GENERAL_RULES + LAYER_RULES


def situation_of(dla: Dla, tensorrt: str | None, precision: Precision) -> Situation:
    """Return what a build is for; `tensorrt` None takes that of the generation's last JetPack.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    version = parse_version(tensorrt or USUAL_TENSORRT[dla.generation])
    return Situation(dla.generation, version, precision)


def judge(
    view: NodeView, dla: Dla, tensorrt: str | None, precision: Precision
) -> tuple[Verdict, ...]:
    """Return every rule that keeps the node off the DLA; none: it may run there.

    `tensorrt` None takes the version of the generation's last JetPack.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    rules = _holding(view.op, situation_of(dla, tensorrt, precision))
    verdicts = (rule.verdict(view) for rule in rules)
    return tuple(verdict for verdict in verdicts if verdict is not None)


@cache
def _holding(op: str, situation: Situation) -> tuple[Rule[NodeView], ...]:
    return tuple(rule for rule in RULES if rule.binds(op) and not rule.idle(situation))
