"""What a bundle says of itself, and whether it is true.

unpacked     a checked bundle in a folder for a while, with its engines opened
description  what `tandem bundle inspect` shows
verify       every hash, the engine's own checks, and the fleet's signature
difference   what changed between two bundles
fetch_bytes  what a board that has one of them fetches for the other
signature    where a bundle is published, and whether a trusted root leads there
"""
