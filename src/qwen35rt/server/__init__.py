"""HTTP on one side, an engine on the other: OpenAI-compatible requests, answers and streams."""
