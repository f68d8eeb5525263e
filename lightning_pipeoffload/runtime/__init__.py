"""One rank of a pipeline in torch: cuts the user's module into stages and executes a plan."""
