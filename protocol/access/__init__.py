"""Which nodes may speak to us, and how much: keys, grants, invitations, budgets, blame."""
