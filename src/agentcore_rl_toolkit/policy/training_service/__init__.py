"""A training service without a wire: a model with training verbs, ordered operations, and Tinker's client methods over both."""
