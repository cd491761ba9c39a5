"""The command line, ``coresample``: one module per group of commands, each importing what it needs when it runs."""

from extract_core.cli.app import app, main

__all__ = ["app", "main"]
