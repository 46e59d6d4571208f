"""Units of any network: what lives or dies together, found from its graph, and networks without them."""
