"""The set of records, and how nodes unite it: push, anti-entropy, and whom to tell of payloads."""
