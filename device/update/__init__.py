"""Updates: decisions, the two slots, bundles, resumable transfers. Imports neither agent nor
runtime.
"""
