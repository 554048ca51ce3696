"""Command-line options that several subcommands share."""
