"""Recipes: from stored tensors to those of the running model, and back."""
