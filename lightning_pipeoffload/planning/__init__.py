"""The strategy's arguments, and the plan and memory that follow from them and measurements."""
