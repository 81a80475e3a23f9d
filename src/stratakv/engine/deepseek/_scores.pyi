from typing import Any

import numpy as np
import numpy.typing as npt

def votes_into(
    query: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    pool: npt.NDArray[Any],
    rows: npt.NDArray[np.int64],
    found: npt.NDArray[np.float32],
    unit: float,
    /,
) -> None: ...
def best_into(scores: npt.NDArray[np.float32], places: npt.NDArray[np.int64], /) -> None: ...
