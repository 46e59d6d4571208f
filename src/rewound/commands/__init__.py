"""What the commands do; their words, arguments and help are in `cli`."""
