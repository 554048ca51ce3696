"""Why a segment gets no cubins."""

from collections.abc import Mapping

from toolkit.errors import BuildError


class NotCoveredError(BuildError):
    """Nodes that no kernel computes; they stay with their portable implementation.

    `reasons`: why, by the name of the node. Without any, the segment is not covered as a whole.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        """Keep the reasons beside the message."""
        super().__init__(message)
        self.reasons: Mapping[str, str] = dict(reasons or {})


def not_covered(reasons: Mapping[str, str]) -> NotCoveredError:
    """Return one error for all these nodes: the first reason, and how many others there are."""
    first, *more = dict.fromkeys(reasons.values())
    suffix = f" (and {len(more)} more reasons)" if more else ""
    return NotCoveredError(f"{first}{suffix}", reasons)


class CompileError(BuildError):
    """A kernel does not compile, or does not fit the GPU of the profile."""
