"""The figures of the pages, drawn by `python -m docs.generate`."""
