"""Pure functions on tensors: what runs. `paritygate_reference` says what each of them means."""
