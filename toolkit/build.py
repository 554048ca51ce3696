"""The build as a library: `build_engine` takes a model and a profile and writes an engine file.

The steps are in `toolkit.engine.build`.
"""

from toolkit.engine.build import BuildOptions, BuildResult, build_engine

__all__ = ["BuildOptions", "BuildResult", "build_engine"]
