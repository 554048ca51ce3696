"""How good an engine is: speed (`bench`), arithmetic (`compare`), detections (`score.py`)."""
