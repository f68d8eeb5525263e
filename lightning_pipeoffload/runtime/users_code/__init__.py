"""State of the user's code beside parameters: attributes, generators, files, Python modules."""
