"""Run in a process of its own by test_requests.py: looks at requests inside a live EngineCore, prints JSON."""

from __future__ import annotations

import json
import sys

import msgspec


def main(spec_json: str) -> None:
    """Make requests the right way and the seed's way."""
    from extract_core.engine import compat
    from extract_core.engine.driver import EngineDriver
    from extract_core.engine.protocol import EngineSpec
    from extract_core.errors import EngineIncompatibleError

    driver = EngineDriver(msgspec.json.decode(spec_json, type=EngineSpec))
    core = driver.core
    ids = [5 + n % 200 for n in range(400)]
    request = compat.make_request(core, "right", ids)
    block = compat.hash_block_size(core)
    expected = core.request_block_hasher(_without_hashes(request, ids))
    result = {
        "block": block,
        "hashes": len(request.block_hashes),
        "equal_to_the_engines_own": list(request.block_hashes) == list(expected),
        "skips_reading": request.skip_reading_prefix_cache,
    }
    by_hand = _without_hashes(request, ids)
    try:
        compat.refuse_without_hasher(core, by_hand)
        result["refused"] = ""
    except EngineIncompatibleError as error:
        result["refused"] = str(error)
    short = _without_hashes(request, ids[: block - 1])
    compat.refuse_without_hasher(core, short)  # shorter than a block: no hash is due
    print("RESULT " + json.dumps(result), flush=True)


def _without_hashes(request, ids):
    from vllm.v1.request import Request

    return Request(
        request_id="by hand",
        prompt_token_ids=ids,
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_hasher=None,
    )


if __name__ == "__main__":
    main(sys.argv[1])
