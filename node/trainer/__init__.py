"""What stands around a training loop: the outer loop, encoding, checkpoints, ranks, attaching."""
