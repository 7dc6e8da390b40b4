"""What clients own: sessions, training models, sampling sessions, checkpoints and the promises of their results."""
