"""The model as a function of records: where a tensor lies, what a payload is, what a round becomes."""
