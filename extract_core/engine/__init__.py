"""The inference engine: vLLM's own EngineCore in a disposable child process.

The only package that imports vLLM, and only inside that child: ``process.py`` is what the rest of Coresample calls.
"""
