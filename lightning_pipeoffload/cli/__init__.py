"""The commands: configuration, plans and output."""
