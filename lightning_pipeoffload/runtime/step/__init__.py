"""F, B and W of one stage and microbatch: the user's step, of which one stage's blocks run."""
