"""Where a running server may be told to write."""

from pathlib import Path

import pytest

from stratakv.core.errors import ConfigError
from stratakv.storage.urls import FileUrl, Roots, check_roots, parse_storage_url


def checked(roots: Roots, directory: Path | str) -> Path:
    url = roots.checked(parse_storage_url(f"file://{directory}?quota=1GiB"))
    assert isinstance(url, FileUrl)
    assert url.quota_bytes == 1 << 30
    return url.directory


def test_a_root_and_what_is_below_it_is_allowed(tmp_path: Path):
    roots = Roots([tmp_path / "a", tmp_path / "b"])
    for name in ("a", "a/deep/er", "b/../a/x", "b/"):
        assert checked(roots, tmp_path / name) == (tmp_path / name).resolve()


@pytest.mark.parametrize("name", ["", "ab", "c", "a/../c", "a/../../", "a/out", "a/out/more", ".."])
def test_what_is_not_below_a_root_is_refused_wherever_a_link_leads(tmp_path: Path, name: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "a" / "out").symlink_to(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"^--storage file:///.*: a running server attaches no s"):
        checked(Roots([tmp_path / "a"]), tmp_path / name)


def test_a_link_is_allowed_by_where_it_leads_and_is_not_followed_again(tmp_path: Path):
    (tmp_path / "a" / "store").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert checked(Roots([tmp_path / "a"]), tmp_path / "link" / "store") == tmp_path / "a" / "store"
    assert checked(Roots([tmp_path / "link"]), tmp_path / "a") == tmp_path / "a"


def test_without_roots_only_the_directory_of_the_start_is_allowed(tmp_path: Path):
    assert checked(Roots([], tmp_path / "home"), tmp_path / "home") == tmp_path / "home"
    with pytest.raises(ConfigError) as error:
        checked(Roots([], tmp_path / "home"), tmp_path / "home" / "below")
    assert str(error.value).endswith(
        f"allowed are {tmp_path}/home, with which it was started, and those below a "
        "--storage-root, of which it was started with none"
    )
    with pytest.raises(ConfigError, match=r"allowed are those below a --storage-root, of which"):
        checked(Roots([]), tmp_path)


def test_a_refusal_says_what_is_allowed(tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        checked(Roots([tmp_path / "a", tmp_path / "b"], tmp_path / "home"), "/etc")
    assert str(error.value).endswith(
        f"those below --storage-root {tmp_path}/a, and those below --storage-root {tmp_path}/b, "
        f"and {tmp_path}/home, with which it was started"
    )


@pytest.mark.parametrize("url", ["memory://", "redis://h:1/0", "s3://b/p", "mooncake://h:1"])
def test_other_stores_have_no_directory(url: str):
    parsed = parse_storage_url(url)
    assert Roots([]).checked(parsed) is parsed


def test_a_root_is_a_directory_that_exists(tmp_path: Path):
    check_roots(["/", str(tmp_path)])
    (tmp_path / "file").touch()
    for root in ("relative", str(tmp_path / "missing"), str(tmp_path / "file"), ""):
        with pytest.raises(
            ConfigError, match=rf"^--storage-root {root or chr(39) * 2}: allowed is the a"
        ):
            check_roots([root])
