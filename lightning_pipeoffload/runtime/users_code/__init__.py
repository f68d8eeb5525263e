"""What the user's code keeps, draws from and writes beside the parameters of its module."""
