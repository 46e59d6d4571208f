"""A pruned network as one small file, safe to read from a stranger."""
