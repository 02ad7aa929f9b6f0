"""Who is there: rows of everybody, links, suspicion."""
