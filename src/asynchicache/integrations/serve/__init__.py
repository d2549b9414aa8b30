"""An HTTP server in OpenAI's shapes, over one model with a cache before it."""
