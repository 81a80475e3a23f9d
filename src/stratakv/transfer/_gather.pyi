from stratakv.core.ids import PageIds
from stratakv.transfer.copier import SegmentRows

def gather(
    segments: SegmentRows,
    device_pages: PageIds,
    host_pages: PageIds,
    device_capacity: int,
    host_capacity: int,
    host_address: int,
    host_stride: int,
    /,
) -> None: ...
def scatter(
    segments: SegmentRows,
    device_pages: PageIds,
    host_pages: PageIds,
    device_capacity: int,
    host_capacity: int,
    host_address: int,
    host_stride: int,
    /,
) -> None: ...
def scatter_rows(
    segments: SegmentRows,
    device_pages: PageIds,
    device_offsets: PageIds,
    host_pages: PageIds,
    host_offsets: PageIds,
    rows: int,
    device_capacity: int,
    host_capacity: int,
    host_address: int,
    host_stride: int,
    /,
) -> None: ...
