"""The DLA: what its rules take, rewrites that make nodes fit, and the cycles of a layer."""
