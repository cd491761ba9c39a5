"""Measurements, not tests: each prints ratios within one run, with their spread, and writes raw JSON."""
