"""The command line: subcommands, their shared options, the doctor, report texts."""
