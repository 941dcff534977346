"""From prompts to groups of judged rollouts, and from those to training samples: the core that all trainers share."""
