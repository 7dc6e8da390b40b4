"""A file a phase, named as its row of the protocol; a phase knows no other phase."""
