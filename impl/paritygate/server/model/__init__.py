"""A transformers model on packed rows: weights, low-rank adapters, attention, keys and values, compiled products."""
