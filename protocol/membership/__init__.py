"""Who is there: every node's row, links, suspicion."""
