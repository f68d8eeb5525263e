"""F, B and W of one stage and microbatch: the user's step, with only one stage's blocks run."""
