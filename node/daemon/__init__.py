"""The asyncio process of a node: links, records, Phi. It never imports torch."""
