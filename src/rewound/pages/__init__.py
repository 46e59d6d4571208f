"""How results are shown: figures, a page, the terminal."""
