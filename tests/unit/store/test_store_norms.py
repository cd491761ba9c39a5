import hashlib

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open

from extract_core.errors import CorruptDataError
from extract_core.store import layout
from extract_core.store.norms import StoredNorm, decode_norm, encode_norm, norm_formula, read_norm, write_norm
from extract_core.store.records import FinalNormRef
from extract_core.store.root import Root

HIDDEN = 24
WHOSE = {"architecture": "LlamaForCausalLM"}


def vector(seed):
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)).numpy()


def rows(dtype=torch.float32):
    return (torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(9)) * 40 + 3).to(dtype)


RMS = StoredNorm("rms", 1e-5, 0.0, vector(1))
GEMMA = StoredNorm("rms", 1e-6, 1.0, vector(1))
LAYER = StoredNorm("layer", 1e-5, 0.0, vector(1), vector(2))


@pytest.fixture
def root(tmp_path):
    return Root.open(str(tmp_path / "data"))


@pytest.mark.parametrize("norm", [RMS, GEMMA, LAYER], ids=["rms", "gemma", "layer"])
def test_round_trip(root, norm):
    ref = write_norm(root, norm, WHOSE)
    assert (ref.kind, ref.epsilon, ref.offset) == (norm.kind, norm.epsilon, norm.offset)
    path = root.local_path(ref.path)
    data = path.read_bytes()
    assert ref.path == layout.norm_path(hashlib.sha256(data).hexdigest()) and len(data) == ref.nbytes
    found = read_norm(root, ref, HIDDEN)
    assert np.array_equal(found.weight, norm.weight)
    assert torch.equal(found.apply(rows()), norm.apply(rows()))
    with safe_open(path, "pt") as file:  # as anybody would read it
        assert set(file.keys()) == ({"weight"} if norm.bias is None else {"weight", "bias"})
        assert torch.equal(file.get_tensor("weight"), torch.from_numpy(norm.weight))
        metadata = file.metadata()
    assert float(metadata["epsilon"]) == norm.epsilon and float(metadata["offset"]) == norm.offset
    assert metadata["kind"] == norm.kind and metadata["architecture"] == "LlamaForCausalLM"
    assert metadata["formula"].endswith("+ bias") == (norm.bias is not None)


def test_written_once_and_mended(root):
    ref = write_norm(root, LAYER, WHOSE)
    path = root.local_path(ref.path)
    before = path.stat()
    assert write_norm(root, LAYER, WHOSE) == ref
    assert path.stat().st_ino == before.st_ino
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptDataError, match="is damaged: expected"):
        read_norm(root, ref, HIDDEN)
    assert write_norm(root, LAYER, WHOSE) == ref
    assert path.read_bytes() == data
    assert root.list(layout.NORMS) == [path.name]


def test_another_epsilon_is_another_file(root):
    first = write_norm(root, RMS, WHOSE)
    second = write_norm(root, StoredNorm("rms", 2e-5, 0.0, RMS.weight), WHOSE)
    assert first.identity != second.identity and len(root.list(layout.NORMS)) == 2


def test_without_a_norm(root):
    ref = write_norm(root, StoredNorm("none"), WHOSE)
    assert ref == FinalNormRef(kind="none") and root.list(layout.NORMS) == []
    found = read_norm(root, ref, HIDDEN)
    assert torch.equal(found.apply(rows(torch.bfloat16)), rows(torch.bfloat16).float())


def test_reading_refuses(root):
    ref = write_norm(root, RMS, WHOSE)
    with pytest.raises(CorruptDataError, match=r"kind, epsilon, offset and hidden size .*, expected .* 48\)"):
        read_norm(root, ref, 48)
    with pytest.raises(CorruptDataError, match="expected"):
        read_norm(root, ref.model_copy(update={"offset": 1.0}), HIDDEN)
    root.delete(ref.path)
    with pytest.raises(CorruptDataError, match=f"final norm .*{ref.sha256}.* is missing"):
        read_norm(root, ref, HIDDEN)


def test_garbage_is_no_norm():
    good = encode_norm(LAYER, WHOSE)
    for data in (b"", b"\0" * 40, good[:-4], good.replace(b'"kind":"layer"', b'"kind":"laser"'), good[:8] + b"{" * 400):
        with pytest.raises(CorruptDataError, match="final norm here cannot be read"):
            decode_norm(data, "here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_as_torch_has_it(dtype):
    theirs = torch.nn.RMSNorm(HIDDEN, eps=1e-5)
    theirs.weight.data = torch.from_numpy(RMS.weight)
    ours = RMS.apply(rows(dtype))
    assert ours.dtype == torch.float32 and ours.shape == (3, 5, HIDDEN)
    torch.testing.assert_close(ours, theirs(rows(dtype).float()).detach())


def test_gemma_scales_by_one_plus_weight():
    theirs = torch.nn.RMSNorm(HIDDEN, eps=1e-6)
    theirs.weight.data = torch.from_numpy(1 + GEMMA.weight)
    torch.testing.assert_close(GEMMA.apply(rows()), theirs(rows()).detach())


def test_layer_norm_with_bias():
    theirs = torch.nn.LayerNorm(HIDDEN, eps=1e-5)
    theirs.weight.data, theirs.bias.data = torch.from_numpy(LAYER.weight), torch.from_numpy(LAYER.bias)
    torch.testing.assert_close(LAYER.apply(rows()), theirs(rows()).detach())
    plain = torch.nn.functional.layer_norm(rows(), (HIDDEN,), eps=1e-5)
    torch.testing.assert_close(norm_formula(rows(), "layer", 1e-5, None, None), plain)


def test_apply_changes_nothing_and_checks_the_width():
    given = rows()
    LAYER.apply(given)
    assert torch.equal(given, rows())
    assert RMS.apply(given[0, 0]).shape == (HIDDEN,)
    with pytest.raises(ValueError, match=r"rows \[\.\.\., 24\] are expected"):
        RMS.apply(given[..., :1])


def test_vectors_have_one_length():
    for fields in (
        ("rms", 0.0, 0.0, None),
        ("none", 0.0, 0.0, vector(1)),
        ("cosine", 0.0, 0.0, vector(1)),
        ("rms", 0.0, 0.0, vector(1).astype(np.float64)),
        ("layer", 0.0, 0.0, vector(1), vector(2)[:3]),
    ):
        with pytest.raises(ValueError, match="a norm"):
            StoredNorm(*fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "rms"}, "has a file"),
        ({"kind": "none", "path": layout.norm_path("a" * 64), "sha256": "a" * 64, "nbytes": 9}, "has no file"),
        ({"kind": "rms", "path": "norms/x", "sha256": "a" * 64, "nbytes": 9}, "not named by its digest"),
        ({"kind": "rms", "epsilon": -1.0}, "epsilon"),
        ({"kind": "cosine"}, "kind"),
    ],
)
def test_reference_refuses(fields, message):
    with pytest.raises(ValidationError, match=message):
        FinalNormRef(**fields)
