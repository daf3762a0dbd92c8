"""The router as an HTTP front before engines that speak OpenAI's API."""
