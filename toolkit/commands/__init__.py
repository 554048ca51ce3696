"""The subcommands of `tandem`, one file each; `toolkit.cli` lists them."""
