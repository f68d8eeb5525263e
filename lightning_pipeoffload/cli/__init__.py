"""What the commands are made of: their configuration, and what they print."""
