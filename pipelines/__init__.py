"""Camera pipelines: frames in, events out."""
