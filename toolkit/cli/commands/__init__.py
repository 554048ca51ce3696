"""The subcommands of `tandem`, one file each; `toolkit.cli.main` lists them."""
