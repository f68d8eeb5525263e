"""One rank through a batch: the split module, the actions of the plan in order, their memory."""
