"""What a run uses of a service and leaves there: time, tokens, money, saved states."""
