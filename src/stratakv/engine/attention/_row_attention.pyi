import numpy as np
import numpy.typing as npt

def attend_into(
    query: npt.NDArray[np.float32],
    keys: npt.NDArray[np.float32],
    values: npt.NDArray[np.float32],
    table: npt.NDArray[np.int32],
    spans: npt.NDArray[np.int64],
    out: npt.NDArray[np.float32],
    sinks: npt.NDArray[np.float32] | None,
    kv_heads: int,
    page_tokens: int,
    scale: float,
    softcap: float,
    first: int,
    last: int,
    /,
) -> None: ...
