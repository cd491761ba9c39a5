"""Prefect flows: order, fan-out, retries and artifacts; no logic of their own."""
