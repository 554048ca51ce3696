"""The command line: subcommands, their options and actions, the doctor."""
