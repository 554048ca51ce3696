"""What the commands of `tandem fleet` do."""
