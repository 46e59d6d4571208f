"""How results are shown in a browser: one page, its data and its charts."""
