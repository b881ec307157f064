"""OpenAI's Responses API: `POST /v1/responses`. Nothing is stored, so a call has its whole conversation."""
