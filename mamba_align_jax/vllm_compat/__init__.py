"""vLLM's own functions under vLLM's names, for code that is ported from vLLM. Nothing else in the package imports this."""
