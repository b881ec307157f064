"""Chooses tokens from logits, in the jitted step."""
