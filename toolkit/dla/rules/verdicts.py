"""Judge a node: the rules of the DLA that refuse it.

The rows are in `general_rules` and `layer_rules`; verdicts keep their order. Rules on loadables and
pools are in `memory`, those on tensors that cross to or from a segment in `formats`. The equal INT8
ranges that the DLA requires around poolings, sums and concatenations refuse no node, because ranges
can always be unified (`toolkit.quantize.scales.rules`).
"""

from functools import cache, lru_cache

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.rules.general_rules import GENERAL_RULES
from toolkit.dla.rules.layer_rules import LAYER_RULES
from toolkit.dla.rules.rule import Generation, Rule, Situation, Verdict, parse_version
from toolkit.graph.node_view import NodeView

# The TensorRT of the last JetPack of each generation (5.1 and 6.2), the default.
USUAL_TENSORRT: dict[Generation, str] = {"v1": "8.5.2", "v2": "10.3.0"}

RULES: tuple[Rule[NodeView], ...] = GENERAL_RULES + LAYER_RULES


def situation_of(dla: Dla, tensorrt: str | None, precision: Precision) -> Situation:
    """Return the situation of a build; `tensorrt` None: that of the generation's last JetPack.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    version = parse_version(tensorrt or USUAL_TENSORRT[dla.generation])
    return Situation(dla.generation, version, precision)


@lru_cache(maxsize=4096)  # a plan asks of the same nodes for each trial
def judge(
    view: NodeView, dla: Dla, tensorrt: str | None, precision: Precision
) -> tuple[Verdict, ...]:
    """Return the verdict of every rule that refuses the node; none: it may run on the DLA.

    `tensorrt` None: the version of the generation's last JetPack.

    Raises PlanError: `tensorrt` is not numbers separated by dots.
    """
    rules = _active_rules(view.op, situation_of(dla, tensorrt, precision))
    verdicts = (rule.verdict(view) for rule in rules)
    return tuple(verdict for verdict in verdicts if verdict is not None)


@cache
def _active_rules(op: str, situation: Situation) -> tuple[Rule[NodeView], ...]:
    return tuple(rule for rule in RULES if rule.binds(op) and not rule.why_inactive(situation))
