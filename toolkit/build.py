"""The build as a library: `build_engine` takes a model and a profile and writes an engine file.

The steps are in `toolkit.engine.build`.
"""

from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.plugins.load import load_plugins
from toolkit.quantize.ranges.measure import RangeOptions

__all__ = ["BuildOptions", "BuildResult", "RangeOptions", "build_engine", "load_plugins"]
