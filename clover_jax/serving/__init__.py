"""The server: OpenAI's API over HTTP, with many clients on one engine."""
