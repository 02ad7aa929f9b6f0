"""The sans-I/O core of a Gossamer node.

Two kinds of code live here. *Consensus* must be the same on all nodes, byte for byte: `records`, `messages`,
`manifest`, `codecs`, `payloads`, `rules`, `merge/merge`, `ledger` and `access/acl`; changing one of them
makes another protocol. *Policy* is a node's own and may differ from node to node: whom to link to, what to
fetch from whom, when to gossip, whom to blame.

Nothing here does I/O, reads a clock, draws its own random numbers or knows torch: state machines take
``(event, now)`` and return effects, and data goes from bytes to validated objects and back. A test
enforces this. The rest of Gossamer carries out what this package decides.
"""
