import pytest

from extract_core.errors import CorruptDataError, NoSuchVersionError, SettingsError
from extract_core.reader import HiddenStatesDataset
from extract_core.store import layout
from extract_core.store.root import Root
from extract_core.store.tags import delete_tag, list_tags, open_ref, read_tag, tagged_version, write_tag
from tests.unit.store.versions_kit import publish_plan


@pytest.fixture
def root(tmp_path):
    root = Root.open(str(tmp_path / "data"))
    for plan, seeds in ((1, (1,)), (2, (2,))):
        publish_plan(root, tmp_path / "spool", plan, seeds)
    return root


def test_set_move_and_remove(root):
    assert write_tag(root, "good", 1) is None and write_tag(root, "good", 1) == 1
    with pytest.raises(SettingsError, match="names version 1, not 2; give --force"):
        write_tag(root, "good", 2)
    assert write_tag(root, "good", 2, force=True) == 1
    write_tag(root, "a.b-c_9", 1)
    assert list_tags(root) == {"a.b-c_9": 1, "good": 2}
    with pytest.raises(NoSuchVersionError, match="no version 9"):
        write_tag(root, "new", 9)
    assert read_tag(root, "new") is None
    delete_tag(root, "good")
    with pytest.raises(SettingsError, match=r"has no tag 'good'; its tags: a\.b-c_9"):
        delete_tag(root, "good")


@pytest.mark.parametrize(
    "name", ["", "latest", "12", "a" * 65, "-a", ".a", "a/b", "../x", "a\n", "a b", "..", "ä", "a\0", "a@b"]
)
def test_names(root, name):
    assert not layout.is_tag_name(name)
    with pytest.raises(SettingsError, match="is no name for a tag: a tag has 1 to 64"):
        write_tag(root, name, 1)
    with pytest.raises(SettingsError):
        delete_tag(root, name)
    with pytest.raises(ValueError, match="no name for a tag"):
        layout.tag_path(name)
    assert read_tag(root, name) is None and root.list(layout.TAGS) == []


def test_other_files_are_no_tags(root):
    for name in ("latest.json", "12.json", "x.txt", ".json"):
        root.put_bytes(f"tags/{name}", b"{}")
    assert list_tags(root) == {}


def test_references(root, tmp_path):
    write_tag(root, "good", 1)
    assert open_ref(f"{root.url}@good")[1] == 1 and open_ref(root.url)[1] is None
    assert open_ref(f"{root.url}@2")[1] == 2 and open_ref(f"{root.url}@latest")[1] is None
    with pytest.raises(SettingsError, match=r"has no tag 'bad' \(its tags: good\).*after the @ is no version"):
        open_ref(f"{root.url}@bad")
    folder = tmp_path / "data@bad"
    folder.mkdir()
    assert open_ref(str(folder))[0].url == str(folder)
    (tmp_path / "data@good").mkdir()  # a folder of the whole name, and a tag of the other: the tag
    assert open_ref(f"{root.url}@good")[1] == 1
    assert open_ref(str(tmp_path / "none@good"))[0].url == str(tmp_path / "none@good")


def test_reader(root):
    write_tag(root, "good", 1)
    assert HiddenStatesDataset(root.url, version="good").manifest.version == 1
    assert HiddenStatesDataset(f"{root.url}@good", version=None).manifest.version == 1
    assert tagged_version(root, "good") == 1
    with pytest.raises(SettingsError, match=r"neither a number nor 'latest', nor a tag of .*; its tags: good"):
        HiddenStatesDataset(root.url, version="bad")
    with pytest.raises(SettingsError, match="neither a number"):
        HiddenStatesDataset(root.url, version="../../x")


def test_damage(root):
    write_tag(root, "good", 1)
    data = root.read_bytes("tags/good.json")
    root.put_bytes("tags/copied.json", data)
    root.put_bytes("tags/good.json", data.replace(b'"version":1', b'"version":2'))
    damaged = {}
    assert list_tags(root, damaged=damaged) == {} and set(damaged) == {"good", "copied"}
    with pytest.raises(CorruptDataError, match=r"own checksum.*set it again: coresample tag .*@VERSION good --force"):
        open_ref(f"{root.url}@good")
    with pytest.raises(CorruptDataError, match="says its name is 'good'"):
        read_tag(root, "copied")
    with pytest.raises(CorruptDataError):
        write_tag(root, "good", 1)
    write_tag(root, "good", 1, force=True)
    assert tagged_version(root, "good") == 1
