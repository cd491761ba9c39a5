"""Shard files, records and versions on a local folder or an object store."""
