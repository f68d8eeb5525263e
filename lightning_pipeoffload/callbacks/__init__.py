"""Lightning callbacks that show what a pipeline does."""
