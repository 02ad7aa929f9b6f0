"""What every Gossamer node must agree on, byte for byte.

Nothing here does I/O, reads a clock, draws its own random numbers or knows torch: state machines take
``(event, now)`` and return effects, and data goes from bytes to validated objects and back. A test
enforces it. The rest of Gossamer carries out what this package decides.
"""
