"""Where states live: artifacts that are whole or not there, the claims on them, and the store of both."""
