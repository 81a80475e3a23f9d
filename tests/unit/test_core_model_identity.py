"""The identity of a model directory: every byte decides it, and it is that of what was loaded."""

import errno
import json
import logging
import mmap
import os
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stratakv.core.clock import ManualClock
from stratakv.core.errors import ConfigError
from stratakv.core.identity import digest_cache, rank_shares, tensor_reader
from stratakv.core.identity.digest_cache import DigestCache
from stratakv.core.identity.file_stat import Kernel, file_system_of
from stratakv.core.identity.safetensors_layout import read_layout
from stratakv.core.identity.tensor_reader import TensorReader
from stratakv.core.model_identity import ModelIdentity, Surroundings
from stratakv.testing.patience import PATIENCE_S
from tests.unit.test_core_digest_cache import STAT
from tests.unit.test_testing_fleet_thread_ranks import together

WEIGHTS = {
    "model.embed.weight": np.arange(60, dtype=np.float32).reshape(15, 4),
    "model.0.weight": np.arange(12, dtype=np.int8).reshape(3, 4),
    "model.1.weight": np.arange(12, dtype=np.int8).reshape(3, 4),
    "model.norm.weight": np.ones(4, np.float16),
    "model.scale": np.array(3, np.float64),
}
CONFIG = {"model_type": "x", "rope_theta": 10000.0}


def save(directory, weights=WEIGHTS, shards=1, metadata=None):
    """A directory with a config and ``weights`` in so many files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    metadata = metadata or {"format": "pt"}
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata)
        return directory
    names, where = sorted(weights), {}
    for at in range(shards):
        file = f"model-{at}-of-{shards}.safetensors"
        mine = names[at::shards]
        save_file({name: weights[name] for name in mine}, directory / file, metadata)
        where |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def around(directory=None, *, young_s=3600.0, trusted=True, boot="boot"):
    """The machine, ``young_s`` after now; with a cache in ``directory``."""
    kernel = Kernel(boot=boot, file_system=lambda fd: "ext4" if trusted else "nfs")
    return Surroundings(kernel, DigestCache(directory, boot, ManualClock(time.time() + young_s)), 2)


def identity(directory, where=None, how=("dtype float32",), meanwhile=lambda: None):
    with ModelIdentity(directory, None, where or around()) as under_way:
        meanwhile()
        return under_way.finish(*how)


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model", shards=2)


@pytest.fixture
def hashed(monkeypatch):
    """Bytes of tensors that were hashed, by file."""
    found = {}
    real = TensorReader.read

    def counting(self, task):
        if task.hashed:
            count = sum(task.piece.tensors[at].size for at in task.hashed)
            name = task.piece.path.name
            found[name] = found.get(name, 0) + count
        return real(self, task)

    monkeypatch.setattr(TensorReader, "read", counting)
    return found


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# -- what decides it -------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_every_byte_of_every_tensor_decides_it(tmp_path, shards):
    path, where = save(tmp_path / "model", shards=shards), around(trusted=False)  # no sync
    found = {identity(path, where)}
    count = 0
    for file in sorted(path.glob("*.safetensors")):
        data = file.read_bytes()
        for at in range(8 + int.from_bytes(data[:8], "little"), len(data)):
            flip(file, at)
            found.add(identity(path, where))
            flip(file, at)
            count += 1
    assert count == sum(array.nbytes for array in WEIGHTS.values())
    assert len(found) == 1 + count
    assert identity(path) in found


def test_names_shapes_dtypes_and_metadata_decide_it(tmp_path):
    first, second = WEIGHTS["model.0.weight"], WEIGHTS["model.embed.weight"]
    others = [
        {},
        {"model.0.weight": first.reshape(4, 3)},
        {"model.0.weight": first.astype(np.uint8)},  # the same bytes
        {"model.0.weight": second, "model.embed.weight": first},
        {"model.more": np.zeros(0, np.int8)},
    ]
    found = [identity(save(tmp_path / "m", WEIGHTS | other)) for other in others]
    fewer = dict(WEIGHTS)
    fewer["model.2.weight"] = fewer.pop("model.1.weight")
    found.append(identity(save(tmp_path / "m", fewer)))
    found.append(identity(save(tmp_path / "m", metadata={"format": "np"})))
    found.append(identity(save(tmp_path / "m", metadata={"format": "pt", "a": "b"})))
    assert len(set(found)) == len(found)


def test_the_same_tensors_in_other_files_are_the_same_model(tmp_path):
    found = {identity(save(tmp_path / f"m{shards}", shards=shards)) for shards in (1, 2, 3, 5)}
    assert len(found) == 1


def test_of_two_tensors_of_one_name_the_order_of_their_files_decides_it(tmp_path):
    """The loader takes the last one."""

    def both(*values):
        path = save(tmp_path / "m", {"a": np.zeros(1), "b": np.ones(1)}, shards=2)
        for at, value in enumerate(values):
            file = path / f"model-{at}-of-2.safetensors"
            save_file({**load_file(file), "twice": np.array([value])}, file)
        return identity(path)

    assert both(1.0, 2.0) != both(2.0, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"dtype": "bfloat16"},
    ],
)
def test_the_config_decides_it(model, change):
    before = identity(model)
    (model / "config.json").write_text(json.dumps(CONFIG | change))
    assert identity(model) != before


def test_other_settings_beside_it_decide_it_and_text_does_not(model):
    before = identity(model)
    for name in ("generation_config.json", "tokenizer.json", "chat_template.json", "README.md"):
        (model / name).write_text("{}")
    assert identity(model) == before
    found = {before}
    for name in ("config.5.0.0.json", "quantize_config.json", "hf_quant_config.json"):
        (model / name).write_text("{}")
        found.add(identity(model))
    assert len(found) == 4


def test_weights_that_are_not_loaded_are_not_hashed(model, hashed):
    before = identity(model)
    save_file({"x": np.zeros(9)}, model / "consolidated.safetensors")
    assert identity(model) == before
    assert hashed.keys() == {"model-0-of-2.safetensors", "model-1-of-2.safetensors"}
    shutil.copy(model / "model-0-of-2.safetensors", model / "model.safetensors")
    assert identity(model) != before  # which the loader prefers to the index


def test_how_it_runs_decides_it(model):
    ways = [(), ("dtype float32",), ("dtype bfloat16",), ("a", "b"), ("ab",), ("b", "a")]
    assert len({identity(model, how=how) for how in ways}) == len(ways)


def test_where_it_lies_does_not(model, tmp_path):
    before = identity(model)
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "link").symlink_to(model)
    linked = tmp_path / "blobs"  # as a hub's cache keeps them
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert {identity(tmp_path / name) for name in ("copy", "link", "blobs")} == {before}


def test_pieces_of_any_size_make_the_same(model, monkeypatch):
    before = identity(model)
    for piece, chunk in ((1, 1), (1, 7), (50, 64), (1 << 30, 3)):
        monkeypatch.setattr(tensor_reader, "PIECE_BYTES", piece)
        monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", chunk)
        assert identity(model) == before


# -- what cannot be read ---------------------------------------------------------------------------


def unmake_index(text):
    def unmake(path):
        (path / "model.safetensors.index.json").write_bytes(text)

    return unmake


@pytest.mark.parametrize(
    "unmake",
    [
        lambda path: (path / "model-0-of-2.safetensors").unlink(),
        lambda path: (path / "model-0-of-2.safetensors").write_bytes(b"x" * 1000),
        lambda path: (path / "model.safetensors.index.json").unlink(),
        unmake_index(b""),
        unmake_index(b"[" * 100_000),
        unmake_index(b"[]"),
        unmake_index(b'{"weight_map": {}}'),
        unmake_index(b'{"weight_map": {"a": 1}}'),
        unmake_index(b'{"weight_map": {"a": "../nowhere"}}'),
        unmake_index(b'{"weight_map": {"a": "config.json"}}'),
        unmake_index(b'{"weight_map": {"a": "\\u0000"}}'),
        shutil.rmtree,
    ],
)
def test_a_directory_that_is_no_model_is_refused(model, unmake):
    unmake(model)
    with pytest.raises(ConfigError, match=r"^MODEL .*/model: not a causal LM that loads: ."):
        ModelIdentity(model, None, around())


# -- what changes meanwhile ------------------------------------------------------------------------

CHANGES = {
    "a byte": lambda path: flip(path / "model-1-of-2.safetensors", 1000),
    "shorter": lambda path: os.truncate(path / "model-1-of-2.safetensors", 500),
    "longer": lambda path: os.truncate(path / "model-1-of-2.safetensors", 5000),
    "gone": lambda path: (path / "model-1-of-2.safetensors").unlink(),
    "replaced": lambda path: shutil.copy(
        path / "model-0-of-2.safetensors", path / "model-1-of-2.safetensors"
    ),
    "the config": lambda path: (path / "config.json").write_text("{}"),
    "another setting": lambda path: (path / "more.json").write_text("{}"),
    "other files": lambda path: shutil.copy(
        path / "model-0-of-2.safetensors", path / "model.safetensors"
    ),
}


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_it_is_loaded_is_refused(tmp_path, change, trusted):
    weights = WEIGHTS | {"model.norm.bias": np.zeros(400)}
    path = save(tmp_path / "model", weights, shards=2)
    with pytest.raises(ConfigError, match=r"changed while it was loaded; allowed are files that"):
        identity(path, around(trusted=trusted), meanwhile=lambda: CHANGES[change](path))


def test_a_change_that_restores_size_and_mtime_is_refused(model):
    file = model / "model-1-of-2.safetensors"
    kept = file.stat()
    fd = os.open(file, os.O_RDONLY)
    if file_system_of(fd) not in {"ext4", "xfs", "btrfs"}:
        pytest.skip("its file system is not trusted")
    os.close(fd)

    def there_and_back():
        for _ in range(2):
            flip(file, kept.st_size - 1)
        os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))

    with pytest.raises(ConfigError, match=r"model-1-of-2\.safetensors: it was changed"):
        identity(model, meanwhile=there_and_back)


def test_files_whose_inodes_say_nothing_are_read_twice(model, hashed):
    size = sum(array.nbytes for array in WEIGHTS.values())
    first = identity(model)
    assert sum(hashed.values()) == size
    assert identity(model, around(trusted=False)) == first
    assert sum(hashed.values()) == 3 * size


def test_files_whose_inodes_say_nothing_are_read_before_the_load_begins(model, monkeypatch):
    """Else they could change between the load and the first of two equal digests."""
    read_piece, pause, read = TensorReader.read, TensorReader.pause, []
    awaited = threading.Event()

    def late(self, task):
        """Nothing is read before somebody waits for it, or has begun without it."""
        assert awaited.wait(PATIENCE_S), "nobody waits"
        found = read_piece(self, task)
        read.append(task.piece.path.name)
        return found

    def waits(self):
        awaited.set()
        pause(self)

    monkeypatch.setattr(TensorReader, "read", late)
    monkeypatch.setattr(TensorReader, "pause", waits)
    with ModelIdentity(model, None, around(trusted=False)):
        found = sorted(read)
        awaited.set()
    assert found == ["model-0-of-2.safetensors", "model-1-of-2.safetensors"]


def test_one_that_is_closed_hashes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 1)
    under_way = ModelIdentity(save(tmp_path / "m", {"a": np.zeros(10_000_000)}), None, around())
    under_way.begin(lambda tensor: True)
    under_way.close()
    with pytest.raises(ConfigError, match="nobody waits"):
        under_way.finish()


# -- what is taken ---------------------------------------------------------------------------------


def everything(path):
    """Where each tensor of each file is."""
    return {
        file: [(one.begin, one.end) for one in seen.tensors]
        for file in path.glob("*.safetensors")
        for seen in [layout(file)]
    }


def layout(file):
    with file.open("rb") as opened:
        return read_layout(opened.fileno(), file.stat().st_size)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("guess", [True, False])
def test_what_is_taken_is_what_is_hashed(model, hashed, trusted, guess, monkeypatch):
    """Read once where it was guessed what is taken, before the load has ended."""
    monkeypatch.setattr(tensor_reader, "CHUNK_BYTES", 7)
    plain = identity(model)
    hashed.clear()
    with ModelIdentity(model, None, around(trusted=trusted)) as under_way:
        under_way.begin(lambda tensor: guess)
        held = under_way.take(everything(model))
        size = sum(array.nbytes for array in WEIGHTS.values())
        assert under_way.finish("dtype float32") == plain
        assert sum(hashed.values()) == size * (1 if trusted and guess else 2)
    for file, ranges in everything(model).items():
        data = file.read_bytes()
        for begin, end in ranges:
            assert bytes(held.lookup(file, begin, end)) == data[begin:end]
            assert bytes(held.lookup(file, begin + 1, end)) == data[begin + 1 : end]
        assert held.lookup(file, ranges[0][0], ranges[1][1]) is None  # two tensors
        assert held.lookup(file, 0, 8) is None
    assert held.lookup(model, 0, 1) is None


@pytest.mark.parametrize("trusted", [True, False])
def test_what_changes_between_the_load_and_the_taking_is_refused(model, trusted):
    """Parts of it may have been converted from the bytes before."""
    under_way = ModelIdentity(model, None, around(trusted=trusted))
    file = model / "model-1-of-2.safetensors"
    flip(file, file.stat().st_size - 1)

    def load():
        under_way.take(everything(model))
        under_way.finish()

    with under_way, pytest.raises(ConfigError, match="changed while it was loaded"):
        load()


def test_what_is_read_after_the_load_is_what_was_hashed_beside_it(model, monkeypatch):
    """Where the guess was wrong, whatever the inodes say."""
    under_way = ModelIdentity(model, None, around())
    monkeypatch.setattr("stratakv.core.model_identity.change_since", lambda *_: "")
    file = model / "model-1-of-2.safetensors"
    with under_way:
        under_way.begin(lambda tensor: False)
        under_way._readers[-1][1].pause()
        flip(file, file.stat().st_size - 1)
        with pytest.raises(ConfigError, match=r"model-1-of-2\.safetensors: it was changed while"):
            under_way.take(everything(model))


def test_of_what_cannot_be_taken_nothing_is_held(model):
    under_way = ModelIdentity(model, None, around())
    used = everything(model)
    os.truncate(model / "model-1-of-2.safetensors", 190)
    with under_way, pytest.raises(ConfigError, match="shorter while it was read"):
        under_way.take(used)


@pytest.mark.parametrize("begun", [True, False])
def test_only_tensors_that_are_asked_for_are_held(model, begun):
    used = {file: ranges[:1] for file, ranges in everything(model).items()}
    with ModelIdentity(model, None, around()) as under_way:
        if begun:
            under_way.begin(lambda tensor: True)
        held = under_way.take(used)
    assert {path: len(found) for path, found in held.buffers.items()} == dict.fromkeys(used, 1)


# -- the next start --------------------------------------------------------------------------------


def test_the_next_start_hashes_nothing(model, tmp_path, hashed, caplog):
    caplog.set_level(logging.INFO)
    first = identity(model, around(tmp_path / "cache"))
    assert "0 B known from before" in caplog.text
    assert hashed
    hashed.clear()
    assert identity(model, around(tmp_path / "cache")) == first
    assert hashed == {}
    assert "0 B hashed here" in caplog.text
    os.utime(model / "model-0-of-2.safetensors")
    assert identity(model, around(tmp_path / "cache")) == first
    assert hashed.keys() == {"model-0-of-2.safetensors"}


def test_a_changed_file_with_its_old_size_and_mtime_is_hashed_again(model, tmp_path, hashed):
    first = identity(model, around(tmp_path / "cache"))
    hashed.clear()
    file = model / "model-1-of-2.safetensors"
    kept = file.stat()
    flip(file, kept.st_size - 1)
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert identity(model, around(tmp_path / "cache")) != first
    assert hashed.keys() == {"model-1-of-2.safetensors"}


@pytest.mark.parametrize(
    "where",
    [{"young_s": digest_cache.YOUNG_S / 2}, {"trusted": False}, {"boot": ""}],
)
def test_what_may_change_unseen_is_not_kept(model, tmp_path, where, hashed):
    first = identity(model, around(tmp_path / "cache", **where))
    hashed.clear()
    assert identity(model, around(tmp_path / "cache", **where)) == first
    assert len(hashed) == 2
    assert not (tmp_path / "cache").exists()


def test_another_boot_hashes_again(model, tmp_path, hashed):
    first = identity(model, around(tmp_path / "cache"))
    hashed.clear()
    assert identity(model, around(tmp_path / "cache", boot="another")) == first
    assert len(hashed) == 2


def test_a_refused_load_keeps_nothing(model, tmp_path):
    with pytest.raises(ConfigError):
        identity(model, around(tmp_path / "cache"), meanwhile=lambda: CHANGES["the config"](model))
    assert not (tmp_path / "cache").exists()


def test_damaged_entries_cost_a_rehash(model, tmp_path, hashed):
    first = identity(model, around(tmp_path / "cache"))
    for entry in (tmp_path / "cache").iterdir():
        data = bytearray(entry.read_bytes())
        data[-40] ^= 1
        entry.write_bytes(data)
    hashed.clear()
    assert identity(model, around(tmp_path / "cache")) == first
    assert len(hashed) == 2


# -- ranks -----------------------------------------------------------------------------------------


def of_ranks(*given):
    """Of each rank, over (directory, surroundings): its identity, or what it refuses."""

    def body(at):
        def identity_of(ranks):
            try:
                with ModelIdentity(given[at][0], ranks, given[at][1]) as under_way:
                    return under_way.finish("dtype float32")
            except ConfigError as error:
                return str(error)

        return identity_of

    return together(*map(body, range(len(given))))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_the_same_files_share_the_work(tmp_path, monkeypatch, hashed, ranks):
    monkeypatch.setattr(tensor_reader, "PIECE_BYTES", 1)
    path = save(tmp_path / "model", shards=2)
    size = sum(array.nbytes for array in WEIGHTS.values())
    wanted = identity(path)
    assert hashed.pop("model-0-of-2.safetensors") + hashed.pop("model-1-of-2.safetensors") == size
    assert of_ranks(*[(path, around())] * ranks) == [wanted] * ranks
    assert sum(hashed.values()) == size


@pytest.mark.parametrize(
    "mine",
    [{"boot": "another machine"}, {"trusted": False}, {"boot": ""}],
)
def test_a_rank_elsewhere_hashes_all_that_it_has(model, hashed, mine):
    wanted = identity(model, around(**mine))
    alone = sum(hashed.values())
    hashed.clear()
    assert of_ranks((model, around()), (model, around(**mine))) == [wanted, wanted]
    assert sum(hashed.values()) == sum(array.nbytes for array in WEIGHTS.values()) + alone


def test_a_byte_in_any_tensor_of_one_rank_is_found(tmp_path):
    """Also in those that the rank would not have hashed itself."""
    path, other = save(tmp_path / "model"), tmp_path / "other"
    shutil.copytree(path, other)
    file = other / "model.safetensors"
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    wanted = identity(path)
    for at in range(start, file.stat().st_size, 11):
        flip(file, at)
        ours, theirs = of_ranks((path, around()), (other, around()))
        assert ours == wanted
        assert theirs == identity(other)
        assert theirs != wanted
        flip(file, at)
    assert of_ranks((path, around()), (other, around())) == [wanted, wanted]


def test_directories_that_share_one_file_are_not_mixed(tmp_path):
    path, other = save(tmp_path / "model", shards=2), tmp_path / "other"
    shutil.copytree(path, other)
    (other / "model-0-of-2.safetensors").unlink()
    os.link(path / "model-0-of-2.safetensors", other / "model-0-of-2.safetensors")
    flip(other / "model-1-of-2.safetensors", 200)
    for pair in ((path, other), (other, path)):
        found = of_ranks(*((one, around()) for one in pair))
        assert found == [identity(one) for one in pair]
        assert found[0] != found[1]


def test_another_config_of_one_rank_is_found(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        os.link(file, other / file.name)
    (other / "config.json").unlink()
    (other / "config.json").write_text("{}")
    ours, theirs = of_ranks((model, around()), (other, around()))
    assert ours == identity(model)
    assert theirs == identity(other)


def test_what_only_one_rank_has_kept_is_hashed_by_both(model, tmp_path, hashed):
    wanted = identity(model, around(tmp_path / "cache"))
    hashed.clear()
    assert of_ranks((model, around(tmp_path / "cache")), (model, around())) == [wanted] * 2
    assert len(hashed) == 2
    hashed.clear()
    assert of_ranks(*[(model, around(tmp_path / "cache"))] * 2) == [wanted] * 2
    assert hashed == {}


def test_all_learn_of_one_that_is_refused(model, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = of_ranks((model, around()), (tmp_path / "other", around()))
    assert first == second
    assert first.startswith(f"rank 1: MODEL {tmp_path}/other: not a causal LM that loads: ")


def test_all_learn_of_one_whose_files_change(model, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    real = ModelIdentity.finish

    def changing(self, *how):
        if self.directory == other:
            flip(other / "model-0-of-2.safetensors", 300)
        return real(self, *how)

    monkeypatch.setattr(ModelIdentity, "finish", changing)
    first, second = of_ranks((model, around()), (other, around()))
    assert first == second
    assert first.startswith(f"rank 1: MODEL {other}: model-0-of-2.safetensors: it was changed")


@pytest.mark.parametrize("begun", [True, False])
def test_all_learn_of_one_that_has_no_memory_for_its_weights(tmp_path, monkeypatch, begun):
    small = save(tmp_path / "small")
    large = save(tmp_path / "large", WEIGHTS | {"more": np.zeros(5000)})
    real = mmap.mmap

    def full(fd, size, flags):
        if size == 40_000:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fd, size, flags)

    monkeypatch.setattr(tensor_reader.mmap, "mmap", full)

    def loading(path):
        def identity_of(ranks):
            with ModelIdentity(path, ranks, around()) as under_way:
                if begun:
                    under_way.begin(lambda tensor: True)
                try:
                    under_way.take(everything(path))
                    return under_way.finish()
                except ConfigError as error:
                    return str(error)

        return identity_of

    message = (
        f"MODEL {large}: no memory for its weights: 39.06 KiB for more: Cannot allocate memory"
    )
    assert together(loading(small), loading(large)) == [f"rank 1: {message}"] * 2
    assert together(loading(large)) == [message]


def test_no_digest_is_taken_from_a_rank_that_may_have_another_file():
    """What a stranger answers is not even looked at."""
    answers = [
        rank_shares.HashReport("", {0: [bytes(16)]}),
        rank_shares.HashReport("", {0: [b"\1" * 16], 1: [b"\1" * 16]}),
    ]
    trusted, doubted = (
        tensor_reader.Piece(0, None, replace(STAT, trusted=flag), ()) for flag in (True, False)
    )
    assert rank_shares.combined([trusted, trusted], answers, [0], 0) == {0: [bytes(16)]}
    mixed = rank_shares.combined([trusted, trusted], answers[1:] + answers[:1], [0], 0)
    assert mixed == {0: [b"\1" * 16], 1: [b"\1" * 16]}
    assert rank_shares.combined([doubted, doubted], answers, [0, 1], 0) == {0: [bytes(16)]}
