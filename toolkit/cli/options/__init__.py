"""Options that several commands share, and how their texts are read. They load nothing heavy."""
