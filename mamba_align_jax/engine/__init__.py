"""A small serving engine around the align step: scheduler, step runner, sampling."""
