"""The pipeline: its configuration, its loop, its figures."""
