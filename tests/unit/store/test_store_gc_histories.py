"""Random histories of a root: whatever is published, tagged, collected, killed and taken up again, no version loses
an object."""

import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extract_core.errors import CoresampleError
from extract_core.store import layout
from extract_core.store.commits import read_commits
from extract_core.store.gc import Policy, collect, survey
from extract_core.store.index import read_index
from extract_core.store.root import Root
from extract_core.store.tags import delete_tag, list_tags, write_tag
from extract_core.store.versions import list_versions, read_manifest
from tests.unit.store.versions_kit import add_plan, age, commit, fingerprint_of, killed_gc, publish_plan, retry

SEEDS = {plan: tuple(sorted({plan % 3, (plan + 1) % 3, 10 + plan % 2})) for plan in range(5)}
PLAN, NAME = st.integers(0, 4), st.sampled_from(["a", "b", "c"])
KEEP, STEP = st.sampled_from([None, 1, 2, 3]), st.integers(0, 25)
ACTION = st.one_of(
    st.tuples(st.just("publish"), PLAN),
    st.tuples(st.just("begin"), PLAN),
    st.tuples(st.just("extract"), PLAN),
    st.tuples(st.just("retry"), PLAN, st.integers(0, 2)),
    st.tuples(st.just("tag"), NAME, st.integers(1, 6)),
    st.tuples(st.just("untag"), NAME),
    st.tuples(st.just("gc"), KEEP, st.booleans()),
    st.tuples(st.just("killed"), KEEP, st.booleans(), STEP),
    st.tuples(st.just("beside"), KEEP, st.booleans(), PLAN),
)


def gc_beside_a_publisher(root, spool, policy, plan):
    """A whole publication right after the first manifest went."""
    plain, done = Root.delete, []

    def delete(self, rel):
        plain(self, rel)
        if rel.startswith(f"{layout.VERSIONS}/") and not done:
            done.append(rel)
            publish_plan(root, spool, plan, SEEDS[plan])

    with mock.patch.object(Root, "delete", delete):
        collect(root, policy)


def check(root, highest):
    """Every version is whole, no number was used twice, unfinished plans have what their records name."""
    versions = list_versions(root)
    if highest:
        assert versions and versions[-1] >= highest
    for version in versions:
        manifest = read_manifest(root, version)
        read_index(root, manifest)
        for path, nbytes in manifest.objects.items():
            assert root.size(path) == nbytes
    for name in root.list(layout.PLANS):
        if root.exists(layout.plan_meta_path(name)):
            for record in read_commits(root, name).values():
                assert all(root.exists(path) for path in record.objects)
    return versions[-1] if versions else 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=st.lists(ACTION, min_size=3, max_size=12))
def test_no_version_loses_an_object(actions):
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        root, spool = Root.open(f"{folder}/data"), Path(folder) / "spool"
        highest = 0
        for action, *rest in actions:
            try:
                if action == "publish":
                    publish_plan(root, spool, rest[0], SEEDS[rest[0]])
                elif action == "begin":
                    add_plan(root, rest[0], len(SEEDS[rest[0]]))
                    commit(root, spool, rest[0], 0, SEEDS[rest[0]][0])
                elif action == "extract":
                    add_plan(root, rest[0], len(SEEDS[rest[0]]))
                    for number, seed in enumerate(SEEDS[rest[0]]):
                        commit(root, spool, rest[0], number, seed)
                elif action == "retry":
                    retry(root, spool, *rest)
                elif action == "tag":
                    write_tag(root, rest[0], rest[1], force=True)
                elif action == "untag":
                    delete_tag(root, rest[0])
                elif action == "gc":
                    collect(root, Policy(rest[0], 3600, rest[1]))
                elif action == "killed":
                    killed_gc(root, Policy(rest[0], 3600, rest[1]), rest[2])
                else:
                    gc_beside_a_publisher(root, spool, Policy(rest[0], 3600, rest[1]), rest[2])
            except CoresampleError as error:
                assert error.exit_code == 2, error  # no such version, no such tag, nothing there yet
            tags = list_tags(root)
            highest = check(root, highest)
            assert set(tags.values()) <= set(list_versions(root))
            age(root)
        if highest:
            collect(root, Policy(1, 3600, True))
            check(root, highest)
            assert survey(root, Policy(1, 0, True)).items == []
            used = {path for v in list_versions(root) for path in read_manifest(root, v).objects}
            used |= {p for f in root.list(layout.PLANS) for c in read_commits(root, f).values() for p in c.objects}
            assert {f"{layout.SHARDS}/{name}" for name in root.list(layout.SHARDS)} == {
                path for path in used if path.startswith(layout.SHARDS)
            }
            assert {fingerprint_of(plan) for plan in SEEDS} >= set(root.list(layout.PLANS))
