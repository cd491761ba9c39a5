"""The demo's inputs: which conversations are taken, a source that is cut off, and an intact or damaged model folder."""

import json

import pytest

from examples.demo import prepare


def record(*roles, key="x"):
    return {"id": key, "conversations": [{"from": role, "value": f"{role} {i}"} for i, role in enumerate(roles)]}


@pytest.mark.parametrize(
    ("roles", "usable"),
    [
        (["human", "gpt"], True),
        (["system", "human", "gpt", "human"], True),
        (["human", "human", "gpt"], True),
        (["gpt", "human", "gpt"], False),
        (["human"], False),
        (["system", "human"], False),
        (["system", "gpt"], False),
        (["human", "bing"], False),
        (["user", "gpt"], False),
        (["human", "gpt", "system"], False),
        ([], False),
    ],
)
def test_which_conversations_are_usable(roles, usable):
    assert prepare.is_usable(record(*roles)) is usable


@pytest.mark.parametrize(
    "broken",
    [{}, {"conversations": None}, {"conversations": ["hello"]}, {"conversations": [{"from": "human", "value": None}]}],
)
def test_a_malformed_record_is_not_usable(broken):
    assert prepare.is_usable(broken) is False


@pytest.fixture
def cut_off(tmp_path):
    """A JSON array of three usable records and one other that ends in the middle of a fifth."""
    records = [record("human", "gpt", key=key) for key in "abc"]
    records.insert(1, record("bing", "gpt", key="no"))
    path = tmp_path / "source.json"
    path.write_text(
        json.dumps([*records, record("human", "gpt", key="cut")], ensure_ascii=False)[:-30], encoding="utf-8"
    )
    return path


def test_a_source_that_is_cut_off_gives_what_is_before_the_cut(cut_off, tmp_path):
    out = prepare.write_chats(tmp_path / "deep" / "chats.jsonl", 3, cut_off)
    assert [json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines()] == ["a", "b", "c"]


def test_asking_for_too_many_says_how_many_there_are_and_leaves_nothing(cut_off, tmp_path):
    out = tmp_path / "out" / "chats.jsonl"
    with pytest.raises(prepare.PrepareError, match=r"holds 3 usable conversations, 4 were asked for"):
        prepare.write_chats(out, 4, cut_off)
    assert list(out.parent.iterdir()) == []


def test_text_is_written_as_it_is(tmp_path):
    source = tmp_path / "source.json"
    text = "中文 \u2028 \ud83d\ude00 <b>\n"
    source.write_text(
        json.dumps([{"id": 1.5, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": ""}]}])
    )
    line = prepare.write_chats(tmp_path / "c.jsonl", 1, source).read_bytes()
    assert json.loads(line)["conversations"][0]["value"] == text.encode("utf-16", "surrogatepass").decode("utf-16")
    assert line.count(b"\n") == 1
    assert "中文".encode() in line


def test_a_missing_package_is_named_with_its_remedy():
    with pytest.raises(
        prepare.PrepareError, match=r"no_such_package_x is not installed; install the demo packages: pip"
    ):
        prepare._package_file("no_such_package_x", "f")


@pytest.fixture
def model(tmp_path):
    """A stand-in for a converted checkpoint."""
    folder = tmp_path / prepare.MODEL_NAME
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / prepare.RECORD_NAME).write_text(json.dumps({"files": prepare._digests(folder)}))
    return folder


def test_an_intact_model_is_kept(model, tmp_path):
    assert prepare.is_intact(model)
    assert prepare.prepare_model(tmp_path) == model


@pytest.mark.parametrize("damage", ["change", "remove", "add", "record"])
def test_a_damaged_model_is_seen(model, damage):
    weights = model / "model.safetensors"
    if damage == "change":
        weights.write_bytes(b"weightz")
    elif damage == "remove":
        weights.unlink()
    elif damage == "add":
        (model / "extra.json").write_text("{}")
    else:
        (model / prepare.RECORD_NAME).write_text("{")
    assert not prepare.is_intact(model)


def fake_gguf(tmp_path, monkeypatch):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"gguf")
    monkeypatch.setattr(prepare, "_package_file", lambda *_: gguf)


def test_a_damaged_model_is_replaced(model, tmp_path, monkeypatch):
    (model / "model.safetensors").write_bytes(b"weightz")
    fake_gguf(tmp_path, monkeypatch)

    def convert(gguf, target):
        (target / "model.safetensors").write_bytes(b"new")
        return 2.1

    monkeypatch.setattr(prepare, "_convert", convert)
    prepare.prepare_model(tmp_path)
    assert (model / "model.safetensors").read_bytes() == b"new"
    assert prepare.is_intact(model)


def test_a_failed_conversion_leaves_no_folder(tmp_path, monkeypatch):
    fake_gguf(tmp_path, monkeypatch)

    def convert(gguf, target):
        (target / "half").write_bytes(b"")
        raise prepare.PrepareError("loss of 9.00")

    monkeypatch.setattr(prepare, "_convert", convert)
    home = tmp_path / "home"
    with pytest.raises(prepare.PrepareError, match="loss"):
        prepare.prepare_model(home)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_count_below_one_is_bad_usage(count):
    with pytest.raises(SystemExit) as stopped:
        prepare.main(["--conversations", count])
    assert stopped.value.code == 2


@pytest.mark.slow
def test_the_real_model_predicts_text_and_has_the_shape_that_the_demo_relies_on(demo_model):
    config = json.loads((demo_model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert "quantization_config" not in config
    assert "<|im_start|>" in (demo_model / "chat_template.jinja").read_text()
    assert json.loads((demo_model / prepare.RECORD_NAME).read_text())["loss"] < prepare.LARGEST_LOSS


def test_the_real_source_gives_usable_conversations(sharegpt):
    lines = sharegpt(200).read_bytes().decode().strip("\n").split("\n")
    assert len(lines) == 200
    assert all(prepare.is_usable(json.loads(line)) for line in lines)
