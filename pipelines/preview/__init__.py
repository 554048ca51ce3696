"""A page with the live pictures and figures of a pipeline.

`server.py` serves it; `page.py` is the page itself.
"""
