"""The HTTP server: requests become plans for the engine, its events become answers. Knows no tensor."""
