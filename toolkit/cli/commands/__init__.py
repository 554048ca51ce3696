"""The subcommands of `tandem`, one file each (`fleet` has three); `toolkit.cli.main` lists them."""
