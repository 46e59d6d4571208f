"""What figures, page and terminal share: words, colours and ranges."""
