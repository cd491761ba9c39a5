"""Hostile input: what a stranger's data, models and datasets may hold."""
