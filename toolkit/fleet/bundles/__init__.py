"""Bundles as files: made, looked into, compared, served in chunks.

create       `tandem bundle`, with facts, golden outputs (golden) and a bill of materials (sbom)
blob         chunks with their hashes; delta: chunks as differences; library: a folder of bundles
release      what a desired document says of a bundle
unpacked     a checked bundle in a folder for a while, with its engines opened
inspection   what `tandem bundle inspect` shows; diff: what changed between two
             bundles, and what a board that has one of them fetches for the other
verify       every hash, the engine's own checks, and the fleet's signature (signature)
"""
