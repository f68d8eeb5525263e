"""The values that steps log: captured by microbatch, and published to the other ranks."""
