"""From a declared experiment to finished work: sweeps, plans, and executors that run them."""
