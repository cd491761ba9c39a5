"""What the fork server imports once: everything an engine needs, without running any of it."""

from importlib import import_module

for _name in ("vllm.v1.engine.core", "extract_core.engine.driver", "extract_core.engine.worker"):
    import_module(_name)
