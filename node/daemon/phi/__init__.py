"""The model as a function of records: merging, snapshots, restoring."""
