import json
import time
from types import SimpleNamespace

import pytest

from stratakv.bench import transfer, transfer_v4
from stratakv.core.ids import LayerId
from stratakv.sim.accelerator import Accelerator
from stratakv.testing.patience import wait_until
from stratakv.transfer.copy_plan import Direction

FIGURES = {
    "spec", "page_tokens", "page_bytes", "segment_bytes", "d2h_ratio", "h2d_ratio", "d2h_gb_s",
    "h2d_gb_s", "copy_gb_s", "bytes_moved", "bytes_needed", "bytes_whole",
}  # fmt: skip
SHAPES = [
    (16, 256 << 10, 2 << 10), (16, 256 << 10, 8 << 10), (16, 256 << 10, 32 << 10),
    (64, 1 << 20, 2 << 10), (64, 1 << 20, 8 << 10), (64, 1 << 20, 32 << 10),
]  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A model of four layers, a prefix of six pages, and layers that take no time to speak of."""
    for name, value in {
        "LAYERS": 4, "PREFIX_TOKENS": 1536, "REPEATS": 1, "PREFILLS": 1, "LAYER_S": 1e-5,
    }.items():  # fmt: skip
        monkeypatch.setattr(transfer_v4, name, value)


def test_the_report_has_a_case_per_shape_and_is_written(monkeypatch, small, capsys):
    monkeypatch.setattr(transfer, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(transfer, "TIER_BYTES", 4 << 20)
    monkeypatch.setattr(transfer, "PLAN_BYTES", 2 << 20)
    monkeypatch.setattr(transfer, "REPEATS", 1)
    report = transfer.run()
    assert json.loads(json.dumps(report)) == report
    *uniform, v4 = report["cases"]
    assert [(c["page_tokens"], c["page_bytes"], c["segment_bytes"]) for c in uniform] == SHAPES
    for case in report["cases"]:
        assert set(case) == FIGURES
        assert case["d2h_ratio"] == case["d2h_gb_s"] / case["copy_gb_s"] > 0
        assert case["h2d_ratio"] == case["h2d_gb_s"] / case["copy_gb_s"] > 0
    for case in uniform:
        assert case["bytes_moved"] == case["bytes_needed"] == case["bytes_whole"] == 2 << 20
    # One layer compressed by 4 with its index keys, one by 128, and the window of all four.
    anchor = 64 * (512 + 128) * 2 + 2 * 512 * 2
    swa = 4 * 256 * 512 * 2 + 2 * 4 * (512 + 128) * 2
    live = 2 * 4 * 2 * (512 + 128) * 2 + 2 * 128 * 512 * 2
    assert (v4["page_tokens"], v4["page_bytes"]) == (256, anchor)
    assert v4["bytes_moved"] == v4["bytes_needed"] == 6 * anchor + swa
    assert v4["bytes_whole"] == 6 * (anchor + swa) + live
    assert report["prefill_host_on_ratio"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(SHAPES) + 1 + 3


def test_the_spec_is_v4_flash_with_its_published_sizes():
    anchor, swa, live = transfer_v4.v4_flash_spec().groups
    rows = {b.name: (len(b.layers), b.rows_per_page, b.row_bytes) for b in anchor.buffers}
    assert rows == {"c4": (21, 64, 1024), "c4_index_k": (21, 64, 256), "c128": (20, 2, 1024)}
    assert {b.name: len(b.layers) for b in swa.buffers} == {
        "latent": 43, "c4_overlap": 21, "c4_index_overlap": 21,
    }  # fmt: skip
    assert {b.name for b in live.buffers} == {"c4_open", "c4_index_open", "c128_open"}
    spec = transfer_v4.v4_flash_spec()
    assert transfer_v4.needed_pages(spec, 16384) == [64, 1, 0]
    assert transfer_v4.whole_pages(spec, 16384) == [64, 64, 1]
    room = sum(group.page_bytes for group in spec.groups) * 8 + 64 * 2 * anchor.page_bytes
    assert room < 2**30


def test_layers_wait_for_their_gates_and_take_their_time():
    waited: list[tuple[int, float]] = []
    begin_s = time.perf_counter()

    class Gate:
        def wait(self, layer: LayerId) -> None:
            waited.append((layer, time.perf_counter() - begin_s))

    layers = [LayerId(layer) for layer in range(5)]
    Accelerator(layers, 0.004, chunk_tokens=8).run(Gate(), tokens=4)
    assert [layer for layer, _ in waited] == layers
    assert all(at_s >= layer * 0.002 for layer, at_s in waited)
    assert time.perf_counter() - begin_s >= 5 * 0.002


def test_a_load_is_timed_until_its_last_byte_and_not_until_the_layers_end(small, monkeypatch):
    now_s = [1.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0], sleep=time.sleep)
    monkeypatch.setattr(transfer_v4, "time", clock)

    class Layers:
        """They end long after the load, by the one clock that there is."""

        def run(self, gate, tokens):
            wait_until(lambda: copies.engine.ready(Direction.LOAD), "the load")
            now_s[0] = 9.0

    monkeypatch.setattr(transfer_v4, "accelerator", lambda _: Layers())
    copies = transfer_v4.V4Copies.of(transfer_v4.v4_flash_spec())
    taken_s, moved = copies.load(copies.ends(transfer_v4.np.random.default_rng(0)))
    copies.engine.close()
    assert (taken_s, copies.timed.done_s) == (0.0, 1.0)
    assert moved == transfer_v4.bytes_of(copies.spec, copies.pages)
