"""What the commands do, as functions; their words, arguments and help are in `cli`, which prints what they give."""
