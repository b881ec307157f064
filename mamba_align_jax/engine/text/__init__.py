"""Text in and out: tokenizers, stop strings, chat templates and grammars, and the processes that run what may hang."""
