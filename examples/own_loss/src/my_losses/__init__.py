"""Our losses: a module a loss, torch."""
