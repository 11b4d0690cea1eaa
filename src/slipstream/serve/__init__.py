"""The server: OpenAI's endpoints, a page and metrics over the engine's loop."""
