"""``verify --deep``: extracts sampled rows of a published version again and compares."""
