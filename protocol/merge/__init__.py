"""What becomes of a round's records: one step of Phi, and what that says of their authors."""
