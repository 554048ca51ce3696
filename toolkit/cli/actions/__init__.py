"""What the commands do. A module is imported when its command runs; its imports are at its top.

Functions take one value of the command's options, a dataclass of `toolkit.cli.commands`.
"""
