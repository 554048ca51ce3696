"""Why a segment gets no cubins."""

from toolkit.errors import BuildError


class NotCoveredError(BuildError):
    """A node that no kernel computes; the segment stays with its portable implementation."""


class CompileError(BuildError):
    """A kernel does not compile, or does not fit the GPU of the profile."""
