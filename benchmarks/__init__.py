"""Measurements on a GPU; results/ holds what was measured."""
