"""The engine file: container, manifest, and the checks that run before anything is used."""
