"""Prefect tasks: each one thin call into extract_core."""
