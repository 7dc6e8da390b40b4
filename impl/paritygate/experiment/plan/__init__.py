"""What an experiment will ask for and can show, from its spec and the benchmark's data alone."""
