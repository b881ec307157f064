"""Draft tokens: what a drafter promises, and the drafters of this package."""
