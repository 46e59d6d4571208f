"""Many networks of one recipe trained at once on one GPU: what is compiled, one place of it, and all of them."""
