"""The build of an engine: `build.py` is the numbered driver, the other files are its steps."""
