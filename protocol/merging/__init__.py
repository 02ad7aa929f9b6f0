"""What becomes of a round's records: one step of Phi, and what it says of their authors."""
