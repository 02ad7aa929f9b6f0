"""The set of records, and how it is united: push, anti-entropy, and whom to tell of payloads."""
