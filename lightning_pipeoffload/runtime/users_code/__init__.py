"""State of the user's code other than parameters: attributes, generators, files, Python modules."""
