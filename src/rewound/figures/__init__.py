"""How results are drawn by matplotlib: panels on sheets, the standard figures and the paper's."""
