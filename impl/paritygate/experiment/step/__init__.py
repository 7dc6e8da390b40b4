"""One training step of an arm: rollouts, judgements, teacher scores, advantages, one optimiser step."""
