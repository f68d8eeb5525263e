"""What a rank keeps between F, B and W: counted, sent to the host, computed again."""
