"""What people look at: the admin server, its page, metrics, `gossamer top` and `gossamer peers`."""
