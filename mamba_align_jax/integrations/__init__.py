"""Adapters that run other people's serving stacks on this library's ops. Nothing in the library imports them."""
