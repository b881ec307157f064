"""The HTTP server, with OpenAI's API over one engine. Needs the extra `serve`; see docs/serving.md."""
