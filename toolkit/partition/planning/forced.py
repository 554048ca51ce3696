"""Nodes that the user puts on the DLA or on the GPU, whatever the plan would choose."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.dla.rules.rule import Verdict
from toolkit.errors import PlanError

if TYPE_CHECKING:
    from toolkit.dla.legalize.rewrite import Applied

ALL = "all"
RULE = "F1"
_REASON = "kept on the GPU, as asked"
_LIMIT = "nodes named with `tandem plan --force-gpu` run on the GPU"


@dataclass(frozen=True, slots=True)
class Forced:
    """Names of nodes for the DLA and for the GPU.

    "all": each node that the DLA's rules take, or each that is not named for the DLA.
    """

    dla: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dla or self.gpu)

    def after(self, rewrites: Iterable["Applied"]) -> "Forced":
        """Return the names after rewrites: those of the nodes that stand for a node."""
        names: dict[str, tuple[str, ...]] = {}
        for row in rewrites:
            inside = tuple(name for name in row.nodes if name not in row.borders)
            names |= dict.fromkeys((*row.replaced, row.node), inside)
        return Forced(
            tuple(new for name in self.dla for new in names.get(name, (name,))),
            tuple(new for name in self.gpu for new in names.get(name, (name,))),
        )

    def known(self, names: Iterable[str]) -> "Forced":
        """Return what a graph with these nodes has of them."""
        inside = {*names, ALL}
        return Forced(
            tuple(name for name in self.dla if name in inside),
            tuple(name for name in self.gpu if name in inside),
        )


def check_forced(forced: Forced, names: Iterable[str], refused: Mapping[str, Verdict]) -> None:
    """Raise PlanError: a name is unknown, forced both ways, or of a node that a rule refuses."""
    known = list(names)
    for option, names_forced in (("--force-dla", forced.dla), ("--force-gpu", forced.gpu)):
        for name in names_forced:
            if name not in known and name != ALL:
                similar = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known[:3]
                raise PlanError(
                    f"{option} {name}: the graph that is planned has no such node; the nearest "
                    f"names are {', '.join(similar)}"
                )
    if both := set(forced.dla) & set(forced.gpu):
        raise PlanError(
            f"node {min(both)!r} is named with `tandem plan --force-dla` and --force-gpu: "
            "leave one out"
        )
    for name in forced.dla:
        if (verdict := refused.get(name)) is not None:
            rule = f"rule {verdict.rule} refuses it: " if verdict.rule else ""
            hint = f" ({verdict.hint})" if verdict.hint else ""
            raise PlanError(
                f"node {name!r} cannot be forced onto the DLA: {rule}{verdict.reason}; "
                f"change the node{hint}, or leave it out of `tandem plan --force-dla`"
            )


def forced_to_gpu(forced: Forced, names: Iterable[str]) -> dict[str, Verdict]:
    """Return the verdicts that keep nodes off the DLA by choice; `names`: all nodes."""
    for_gpu = forced.gpu
    if ALL in for_gpu:
        for_gpu = tuple(name for name in names if name not in forced.dla)
    return {
        name: Verdict(rule=RULE, node=name, limit=_LIMIT, actual=_REASON, reason=_REASON, hint="")
        for name in for_gpu
    }


def forced_to_dla(
    forced: Forced, names: Iterable[str], refused: Mapping[str, Verdict]
) -> frozenset[str]:
    """Return the nodes that must be on the DLA."""
    for_dla = frozenset(names) if ALL in forced.dla else frozenset(forced.dla)
    return for_dla - frozenset(refused)
