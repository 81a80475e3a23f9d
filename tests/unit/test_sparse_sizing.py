from dataclasses import replace

import pytest

from stratakv.sparse.sizing import OffloadPages, advice, offload_capacity

PAGES = OffloadPages(
    page_tokens=10, kept_pages=800, selected_pages=90, host_pages=1000, buffer_pages=4
)


def test_what_fits_with_and_without_offload():
    # 40 pages each: 90 / 40 resident; 800 / 40 index keys, 90 / 4 buffers, 1000 / 40 on the host
    fits = offload_capacity(PAGES, 400)
    assert (fits.resident, fits.offloaded) == (2, 20)
    assert fits.bound == "pages that stay on the device"
    assert fits.pays


def test_a_page_that_has_begun_counts_whole():
    assert offload_capacity(PAGES, 391).offloaded == 20
    assert offload_capacity(PAGES, 401).offloaded == 19


@pytest.mark.parametrize(
    ("changed", "offloaded", "bound"),
    [
        ({"host_pages": 200}, 5, "host memory"),
        ({"buffer_pages": 9}, 10, "buffers on the device"),
        ({"kept_pages": 120}, 3, "pages that stay on the device"),
    ],
)
def test_the_scarcest_bounds(changed, offloaded, bound):
    fits = offload_capacity(replace(PAGES, **changed), 400)
    assert (fits.offloaded, fits.bound) == (offloaded, bound)


def test_short_requests_need_no_buffer():
    fits = offload_capacity(replace(PAGES, host_pages=10_000), 40)
    assert fits.resident == fits.offloaded == 22
    assert not fits.pays


def test_a_host_without_room_takes_nothing_from_what_is_resident():
    fits = offload_capacity(replace(PAGES, host_pages=0), 400)
    assert fits.resident == fits.offloaded == 2
    assert not fits.pays
    assert fits.bound == "host memory"


def test_what_stays_bounds_the_resident_too():
    assert offload_capacity(replace(PAGES, kept_pages=40), 400).resident == 1


def test_the_advice_names_where_it_pays_and_what_is_short():
    paying, not_paying = advice(replace(PAGES, host_pages=300), [400, 4000])
    assert paying == (
        "400 tokens each: 2 requests with all on the device, 7 with offload, which pays above 2 at "
        "a time; what is short is host memory"
    )
    assert not_paying == (
        "4,000 tokens each: 0 requests with all on the device, and no more with offload; "
        "what is short is host memory"
    )
