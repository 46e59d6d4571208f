"""How results are shown in the terminal."""
