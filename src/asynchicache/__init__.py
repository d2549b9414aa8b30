"""An asyncio-native hierarchical cache for what hybrid language models have already computed."""
