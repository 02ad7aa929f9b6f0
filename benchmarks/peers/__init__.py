"""The other projects themselves, beside Gossamer: see `matrix`. One file a contender, with its recipe."""
