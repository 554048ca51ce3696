"""Bundles in OCI registries: the HTTP API v2 that container registries speak.

reference    oci://host/name:tag
credentials  who asks: the environment, or what `docker login` has stored
client       requests with tokens, retries and sentences for what goes wrong
manifest     a bundle as an OCI artifact
transfer     push, resolve a tag, pull; both go on where a connection was cut
"""
