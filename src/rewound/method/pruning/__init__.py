"""What is pruned, and how it stays at zero: scores, scopes and patterns make a mask, which any loop trains under."""
