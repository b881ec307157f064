"""Cache events on ZMQ sockets: what an engine publishes, and how another process reads it."""
