"""One node: all state machines behind one door, and what needs several of them."""
