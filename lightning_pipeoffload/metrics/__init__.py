"""What steps log: taken aside microbatch by microbatch, and published to the other ranks."""
