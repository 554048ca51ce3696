"""What the commands of `tandem board` do."""
