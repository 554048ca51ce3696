"""Cut models: `write.py` writes a part as a valid model, `reduce.py` finds the smallest part that
still fails a command, `command.py` runs that command; `pixels.py` lets a model take pixels.
"""
