"""`tandem explain`: what a reason in a report means, where it comes from and what to do."""

from dataclasses import dataclass

from toolkit.cli.command import argument, command, json_option


@dataclass(frozen=True, slots=True)
class Explain:
    """Explain a RULE: the id in a report such as P2 or shuffle.rank; without one, list all.

    An operator such as Resize gives all rules that bind it; the text of a reason that a build
    gives for the GPU works too. `tandem plan --explain NODE` applies the rules to a node.

    Examples: tandem explain G6; tandem explain shuffle.rank; tandem explain Resize
    """

    what: str | None = argument("[RULE]", required=False)
    as_json: bool = json_option("Print the entries as JSON.")


explain = command(Explain, "explain:explain")  # fmt: skip
