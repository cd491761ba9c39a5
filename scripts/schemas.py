"""Keep the JSON Schemas of the newest records in step with the code: ``python scripts/schemas.py [--check]``.

``extract_core/store/schemas/KIND-N.json`` describes a manifest or a commit record of schema version N as its file holds
it, checksum included. The schema of an older version is the last that this script wrote for it, and never changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY))  # at the end: an older checkout may come first

from extract_core.store.records import CommitRecord, Manifest  # noqa: E402

FOLDER = REPOSITORY / "extract_core" / "store" / "schemas"


def version(record: type[CommitRecord] | type[Manifest]) -> int:
    """The newest schema version of a record; the first had no name for it."""
    return int(getattr(record, "newest", 1))


def schema(record: type[CommitRecord] | type[Manifest]) -> dict[str, Any]:
    """JSON Schema of the file of a record, in its newest version."""
    tree = record.model_json_schema(mode="serialization")
    tree["properties"]["schema_version"] = {"const": version(record), "title": "Schema Version"}
    tree["properties"]["checksum"] = {
        "description": "sha256 of the canonical JSON of everything else.",
        "pattern": "^sha256:[0-9a-f]{64}$",
        "type": "string",
    }
    tree["required"] = sorted({*tree["required"], "schema_version", "checksum"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree}


def newest() -> dict[str, str]:
    """File name to text, for the newest version of each record."""
    return {
        f"{record.kind.replace(' ', '-')}-{version(record)}.json": json.dumps(schema(record), indent=1, sort_keys=True)
        + "\n"
        for record in (CommitRecord, Manifest)
    }


def main() -> int:
    """Command line; with ``--check`` nothing is written and 1 says that a schema is out of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    late = {n: t for n, t in newest().items() if not (p := options.out / n).exists() or p.read_text("utf-8") != t}
    for name, text in late.items():
        print(f"{name} {'is out of step; run scripts/schemas.py' if options.check else 'written'}")
        if not options.check:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / name).write_text(text, encoding="utf-8")
    return 1 if late and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
