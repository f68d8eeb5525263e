"""What the demo trains: a plain GPT and text that every Python installation carries."""
