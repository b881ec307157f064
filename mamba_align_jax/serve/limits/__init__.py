"""What keeps one client from the others: limits of connections, of time, and of work that would take long."""
