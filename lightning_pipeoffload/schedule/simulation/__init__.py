"""What a plan costs before it runs: seconds of every lane, bytes of every rank."""
