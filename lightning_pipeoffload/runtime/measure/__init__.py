"""What stages, copies and messages cost on this machine."""
