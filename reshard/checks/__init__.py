"""Checking a plan: one process against N, module by module."""
