"""How images become network inputs: what is stated, what the model says, and what is assumed.

presets.py  preprocessings by name
known.py    models that are known by their metadata or name
decide.py   stated values over known ones over assumed ones, each with its origin
"""
