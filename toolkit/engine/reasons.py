"""Every reason id that a report shows, with what it means: the content of `tandem explain`.

The rows come from the tables that give the reasons.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from toolkit.dla.legalize.rows import REWRITES
from toolkit.dla.rules.formats import FORMAT_RULES
from toolkit.dla.rules.general_rules import GENERAL_RULES
from toolkit.dla.rules.layer_rules import LAYER_RULES
from toolkit.dla.rules.meanings import MEANINGS as DLA_MEANINGS
from toolkit.dla.rules.memory import CORE_RULES, LOADABLE_RULES
from toolkit.dla.rules.notes import NOTES
from toolkit.dla.rules.ops import NATIVE
from toolkit.dla.rules.rule import FLOOR, NEWEST, Rule, S_contra, version_text
from toolkit.errors import PlanError
from toolkit.gpu.reasons import MEANINGS as GPU_MEANINGS
from toolkit.gpu.reasons import reason_id
from toolkit.partition.planning.meanings import LIMITS, SOURCES
from toolkit.partition.planning.meanings import MEANINGS as PLAN_MEANINGS
from toolkit.quantize.scales.rules import SCALE_RULES, ScaleRule

DOCUMENTED = "documented"
_GPU_SOURCE = "`toolkit/gpu/operations.py`"


@dataclass(frozen=True, slots=True)
class Entry:
    """One id. `applies`: operators, DLA generations, precisions and versions, in words."""

    id: str
    family: str
    limit: str
    what: str
    do: str
    applies: str
    source: str
    certainty: str = DOCUMENTED


@cache
def entries() -> tuple[Entry, ...]:
    """Return all ids, family by family, in the order of their tables."""
    return tuple(entry for make in FAMILIES.values() for entry in make())


def find(text: str) -> tuple[Entry, ...]:
    """Return the entries of an id, of an operator, or of a reason that a report gives.

    Of an operator: those that name it; what binds every operator is left out.

    Raises PlanError: it is none of these.
    """
    query = text.strip().strip("[]")
    ids = {query, reason_id(query)}
    named = tuple(entry for entry in entries() if entry.id in ids)
    if named:
        return named
    of_operator = tuple(e for e in entries() if query in _operators(e))
    if of_operator:
        return of_operator
    family = tuple(entry for entry in entries() if entry.id.startswith(f"{query}."))
    if family:
        return family
    all_ids = list(dict.fromkeys(entry.id for entry in entries()))
    similar = difflib.get_close_matches(query, all_ids, n=4, cutoff=0.5)
    nearest = f"; the nearest ids are {', '.join(similar)}" if similar else ""
    raise PlanError(
        f"{query!r} is no rule, no operator that a rule names, and no reason of a report"
        f"{nearest}; `tandem explain` lists all"
    )


def _dla() -> tuple[Entry, ...]:
    return tuple(_rule(rule, "DLA: what it takes") for rule in (*GENERAL_RULES, *LAYER_RULES))


def _dla_memory() -> tuple[Entry, ...]:
    family = "DLA: memory and formats"
    return (
        *(_rule(rule, family) for rule in CORE_RULES),
        *(_rule(rule, family) for rule in LOADABLE_RULES),
        *(_rule(rule, family) for rule in FORMAT_RULES),
    )


def _rule(rule: Rule[S_contra], family: str) -> Entry:
    meaning = DLA_MEANINGS[rule.id]
    return Entry(
        id=rule.id,
        family=family,
        limit=rule.limit_text,
        what=meaning.what,
        do=meaning.do,
        applies=_applies(rule),
        source=rule.source,
        certainty=rule.certainty,
    )


def _applies(rule: Rule[S_contra]) -> str:
    parts = [_names(rule.ops)]
    if rule.generations != ("v1", "v2"):
        parts.append({"v1": "Xavier", "v2": "Orin"}[rule.generations[0]])
    if len(rule.precisions) == 1:
        parts.append(f"{rule.precisions[0].upper()} only")
    first, end = rule.tensorrt
    if first != FLOOR:
        parts.append(f"TensorRT {version_text(first)} and newer")
    if end != NEWEST:
        parts.append(f"TensorRT before {version_text(end)}")
    return "; ".join(parts)


def _names(ops: frozenset[str] | None) -> str:
    if ops is None:
        return "everything"
    return "every operator of the DLA" if ops == NATIVE else ", ".join(sorted(ops))


def _planner() -> tuple[Entry, ...]:
    meanings = {**PLAN_MEANINGS, "G4.cut": DLA_MEANINGS["G4.cut"]}
    return tuple(
        Entry(name, "the planner", LIMITS[name], *meaning, "every node", SOURCES[name])
        for name, meaning in meanings.items()
    )


def _gpu() -> tuple[Entry, ...]:
    return tuple(
        Entry(name, "GPU: why there is no kernel", "", *meaning, "GPU segments", _GPU_SOURCE)
        for name, meaning in GPU_MEANINGS.items()
    )


def _rewrites() -> tuple[Entry, ...]:
    return tuple(
        Entry(
            id=row.id,
            family="rewrites that let nodes onto the DLA",
            limit=row.equation,
            what=f"Needs {row.needs}."
            + (" Every number stays the same." if row.exact else " Equal to within rounding."),
            do=f"INT8: {row.precision}." if row.precision else "Nothing.",
            applies=", ".join(sorted(row.ops)),
            source=row.source,
            certainty=row.certainty,
        )
        for row in REWRITES
    )


def _scales() -> tuple[Entry, ...]:
    return tuple(
        Entry(
            id=f"scale.{row.id}",
            family="INT8 ranges that the DLA wants equal",
            limit=_scale_limit(row),
            what="A tensor may be coarser than its own range asks for; the build says which and by "
            "how much.",
            do="Nothing; the build makes them equal. `tandem compare` shows what it costs.",
            applies=", ".join(sorted(row.ops)),
            source=row.source,
            certainty=row.certainty,
        )
        for row in SCALE_RULES
    )


def _scale_limit(row: ScaleRule) -> str:
    tensors = {"data": "input and outputs"}.get(row.which, row.which)
    if row.kind == "tie":
        return f"{tensors} have one range"
    return f"of {tensors}, those without a range take that of the others"


def _notes() -> tuple[Entry, ...]:
    return tuple(
        Entry(
            id=note.id,
            family="remarks on the DLA",
            limit="",
            what=f"{note.text[0].upper()}{note.text[1:]}.",
            do="Nothing: it is no limit.",
            applies=", ".join(sorted(note.ops)) if note.ops else "every operator of the DLA",
            source=note.source,
            certainty=note.certainty,
        )
        for note in NOTES
    )


FAMILIES: Mapping[str, Callable[[], tuple[Entry, ...]]] = {
    "planner": _planner,
    "dla": _dla,
    "dla memory": _dla_memory,
    "gpu": _gpu,
    "rewrites": _rewrites,
    "scales": _scales,
    "notes": _notes,
}


def _operators(entry: Entry) -> frozenset[str]:
    return frozenset(entry.applies.partition(";")[0].split(", "))


def entry_text(entry: Entry) -> str:
    """Return an entry as text for a terminal."""
    lines = [f"{entry.id}  ({entry.family})"]
    if entry.limit:
        lines.append(f"  limit:   {entry.limit}")
    lines += [
        f"  means:   {entry.what}",
        f"  do:      {entry.do}",
        f"  applies: {entry.applies}",
        f"  source:  {entry.source} ({entry.certainty})",
    ]
    return "\n".join(lines)


def list_text() -> str:
    """Return all ids with a line each."""
    lines: list[str] = []
    family = ""
    width = max(len(entry.id) for entry in entries())
    for entry in entries():
        if entry.family != family:
            family = entry.family
            lines += ["", family] if lines else [family]
        lines.append(f"  {entry.id:{width}}  {entry.limit or entry.what}")
    return "\n".join(lines)


def page() -> str:
    """Return docs/rules.md."""
    lines = [
        "# Reasons and rules",
        "",
        "Written by `python -m scripts.rules_page --write`. Every id that plans, builds and "
        "reports show; `tandem explain RULE` shows one, `tandem explain OPERATOR` all that bind an "
        "operator. `tandem plan --explain NODE` applies them to a node.",
        "",
        "Certainty: *documented* by the source; *observed* on boards or in logs; *recalled*: "
        "inferred, and the cautious reading.",
    ]
    family = ""
    for entry in entries():
        if entry.family != family:
            family = entry.family
            title = f"{family[0].upper()}{family[1:]}"
            lines += ["", f"## {title}", "", "| id | limit | what it means | what to do | source |"]
            lines.append("|---|---|---|---|---|")
        limit = f"{entry.limit}. " if entry.limit else ""
        cells = (
            f"`{entry.id}`",
            f"{limit}*{entry.applies}*",
            entry.what,
            entry.do,
            f"{entry.source} ({entry.certainty})",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
