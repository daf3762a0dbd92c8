"""The router as an HTTP front of engines with OpenAI's API."""
