"""``python -m extract_core.cli``."""

from extract_core.cli import main

main()
