"""What is trained, and Train^t(W, m, g): recipes, their data, and many runs at once on a GPU."""
