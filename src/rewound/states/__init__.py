"""What a state is (how it came to be), where it is stored, and a pruned network as one file."""
