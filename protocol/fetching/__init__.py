"""How payloads are pulled over the links: what is missing, whom to ask, and how long to wait."""
