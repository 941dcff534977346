"""Commands that bring a trained model back into production."""
