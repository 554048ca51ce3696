"""`tandem board`: a file for each group of its subcommands; `group.py` has the list."""
