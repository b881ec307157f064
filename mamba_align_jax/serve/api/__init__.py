"""From a call's body to its answer: what all endpoints share, and each endpoint."""
