"""How results are shown: figures, page and terminal, and the words and colours that they share."""
