"""`tandem fleet`: a file for each group of subcommands; `group.py` is their table."""
