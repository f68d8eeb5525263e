"""What searches for an order of actions, and what they search with."""
