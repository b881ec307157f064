"""A serving engine around the align step: it schedules requests, runs steps and samples tokens."""
