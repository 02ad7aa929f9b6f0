"""Who is there: every node's record, links, suspicion."""
