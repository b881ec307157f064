"""What layers need to know of a step: its rows by kind, the positions of its tokens, and its inputs."""
